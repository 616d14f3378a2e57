"""What `cloister --help` and completion say of each verb, so that neither imports the verbs themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CONTENTS: Final[Mapping[str, Mapping[str, str]]] = {
    "Use a model": {
        "serve": "Serve a model on the OpenAI API until SIGTERM or Ctrl-C.",
        "run": "Answer one prompt on standard output.",
        "chat": "Talk to a model, several turns.",
        "pull": "Download a model, check it and keep it, with its licence, for `serve`, `run` and `chat`.",
        "list": "List the models on this machine: embedded, pulled, in the hub's cache, and in the directories given.",
        "models": "List the models on this machine: embedded, pulled, in the hub's cache, and in the directories given.",
        "show": "Show a model's source, licence, digest, format and defaults of sampling.",
        "rm": "Delete models that were pulled, or that lie in the hub's cache.",
    },
    "Look after a server": {
        "doctor": "Look at this machine: what works, and what to do about what does not.",
        "keys": "Make, list and remove API keys.",
        "policy": "What each privacy profile allows, mitigates and refuses.",
        "bench": "Measure an engine or a server, with real traces, or the operators of a step.",
        "roofline": "Count every operator of a model, in prefill and in decode, and put it under the roof of a chip.",
    },
    "Make models smaller or faster": {
        "quantize": "Write a model in few bits, and say what that costs in perplexity.",
        "train": "Train what drafts tokens for a model; the model itself stays as it is.",
        "datastore": "Public text that drafts are looked up in.",
    },
    "Use a private cloud": {
        "proxy": "Serve the OpenAI API on this machine: every request is sealed to a node that was drawn and verified.",
        "verify": "Check what a node claims and what it keeps.",
        "monitor": "Replay the log: membership, capacities, keys, cadence and releases; compare with what others were shown.",
    },
    "Run a private cloud": {
        "relay": "Carry sealed requests to a gateway, and sealed purchases to an issuer, until SIGTERM or Ctrl-C.",
        "gateway": "Hand sealed requests to nodes, each against a token, until SIGTERM or Ctrl-C.",
        "issuer": "Give tokens against API keys, without seeing what becomes of them.",
        "log": "Keep and check a transparency log.",
        "release": "Make releases, and revoke them.",
        "witness": "Witness the checkpoints of logs.",
    },
}
"""Heading -> verb -> the first sentence of its help; a verb that is missing here is imported for its help."""

SUMMARIES: Final = {verb: summary for verbs in CONTENTS.values() for verb, summary in verbs.items()}
