"""Content in short-lived processes: one worker a sealed request, forked from a zygote that never sees any; keys in a key
service.

The front, which has the network, carries sealed bytes only. A worker gets them from it, the secrets of this one request from
the key service, and a channel of its own to the engine; when its answer is sealed it ends, and the kernel takes its memory
back.
"""
