"""The program of a CUDA device: Triton kernels, one copy in and one out for each step, captured graphs for decode.

Nothing here needs a device until a program is built for one: on a CPU the kernels run in Triton's interpreter, for tests.
"""
