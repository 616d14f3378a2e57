"""The features that profiles judge, in an operator's words: what each does and what it endangers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from cloister.privacy.features import FEATURES
from cloister.privacy.matrix import row_of
from cloister.privacy.verdict import Profile, Ruling, Verdict


@dataclass(frozen=True, slots=True)
class Explained:
    """One feature in an operator's words.

    Attributes:
        asked_for_by: the setting or request field that asks for it; empty for what is always there.
        instead: what to do where it is refused.
    """

    title: str
    asked_for_by: str
    does: str
    endangers: str
    rulings: Mapping[Profile, Ruling]
    instead: str = ""


_WATCHED: Final = "who watches the network reads lengths and times of packets, and from them parts of the text"
_RHYTHM: Final = "the rhythm of packets shows how well the text could be guessed, and so parts of it"
_HABITS: Final = "it shows the operator when each request came, how long it was and how long its answer"

FEATURE_WORDS: Final[Mapping[str, tuple[str, str, str]]] = {
    "prefix-cache": (
        "Prefix cache",
        "keeps what was computed of a prompt, so that the next one that begins alike starts sooner",
        "who shares the cache can tell from the time of an answer whether others sent the same words",
    ),
    "session": (
        "Sessions",
        "lets requests of one client reuse each other's prefixes for five minutes",
        "the server can tell that these requests belong together",
    ),
    "release-prefixes": (
        "Public system prompts",
        "keeps what was computed of the system prompts that you name, for everybody",
        "who asks first after a start can tell that nobody asked before",
    ),
    "one-cache": (
        "One cache for all tenants",
        "lets tenants compete for the memory of the prefix cache",
        "a tenant whose prefix is gone learns that others were busy",
    ),
    "cache-aware-order": (
        "Cached prompts first",
        "lets requests whose prefix is in the cache go first",
        "who waits longer learns that others' prompts were in the cache",
    ),
    "client-priority": (
        "Priority by request",
        "lets a request say how urgent it is",
        "anybody can push others back, or single out one person",
    ),
    "streaming": ("Streaming", "sends an answer while it is being written", _WATCHED),
    "sealed-streaming": ("Streaming from a sealed node", "sends a sealed answer while it is being written", _WATCHED),
    "speculation": ("Speculation", "drafts several tokens and verifies them in one step", _RHYTHM),
    "sealed-speculation": ("Speculation on a sealed node", "drafts several tokens and verifies them in one step", _RHYTHM),
    "datastore": (
        "Datastore of public text",
        "looks drafts up in text that you name",
        "who may ask the server can find out what is in that text",
    ),
    "keyless-bind": (
        "Serving without API keys",
        "answers whoever reaches an address that is not loopback",
        "strangers use the server, and nothing tells one caller from another",
    ),
    "request-log": ("Request log", "writes a line for every request, with counts and times and no content", _HABITS),
    "traces": ("Traces", "sends counts and times of every request to a collector, with no content", _HABITS),
    "receipt": (
        "Receipts",
        "signs a statement about an answer for the client that asks for it",
        "whoever gets hold of it can prove what was said, where and in which hour",
    ),
    "runtime-adapters": (
        "Adapters at run time",
        "lets operators load and unload LoRA adapters while the server runs",
        "a model's name may stand for something else than what was published",
    ),
    "default-model-download": (
        "Download of the default model",
        "fetches the default model from the package index at the first start",
        "the index and the network see that this machine starts to serve it",
    ),
    "identity-tokens": (
        "Sign-in by an OpenID issuer",
        "takes tokens of people from an issuer that you name, beside API keys",
        "the issuer learns who signs in and when, and the server learns which requests are one person's",
    ),
    "files": (
        "Files and batches",
        "keeps uploaded files and answers of batches on disk, encrypted, for 30 days at most",
        "whoever has the disk and the key file can read them",
    ),
    "metrics-history": (
        "History of metrics",
        "keeps the server's figures of the last day in memory, for the board",
        "who opens the board sees when the server was used, also before they came",
    ),
    "tenant-figures": (
        "Figures of tenants",
        "counts requests and tokens of each tenant, for operators",
        "an operator sees who uses the server how much, and, who watches, when",
    ),
    "stored-responses": (
        "Kept responses",
        "keeps conversations of /v1/responses in memory for an hour, so that they can go on",
        "what was said outlives its request",
    ),
    "page-storage": (
        "Conversations kept by the page",
        "lets a person keep conversations in the browser",
        "whoever uses the device or copies its disk can read them",
    ),
}
"""Name in `FEATURES` -> title, what it does, what it endangers."""

ROW_WORDS: Final[Mapping[str, tuple[str, str, str]]] = {
    "paging": (
        "Memory of requests",
        "gives the memory of a request that ended to the next one",
        "unwiped, it would hold what somebody said",
    ),
    "profiling": (
        "Metrics",
        "shows counts and times of all requests at /metrics and on the page",
        "figures about few requests tell the operator about single people",
    ),
}
"""Slug of a row that nobody asks for, as it is always there -> the same."""


def explain_features() -> Iterator[Explained]:
    """Yields every feature that this build can be asked for, then what is always there."""
    for feature in FEATURES.values():
        title, does, endangers = FEATURE_WORDS[feature.name]
        yield Explained(title, feature.setting, does, endangers, feature.rulings, feature.instead)
    for slug, words in ROW_WORDS.items():
        title, does, endangers = words
        yield Explained(title, "", does, endangers, row_of(slug).rulings)


def differing_features(first: Profile, second: Profile) -> Iterator[Explained]:
    """Yields the features that two profiles do not treat alike: another verdict, or another condition of what is mitigated."""
    for feature in explain_features():
        ours, theirs = feature.rulings[first], feature.rulings[second]
        is_conditional = ours.verdict is Verdict.MITIGATED
        if ours.verdict is not theirs.verdict or (is_conditional and ours.text != theirs.text):
            yield feature


def compare_profiles(first: Profile, second: Profile) -> dict[str, object]:
    """Returns `differing_features` as lists and dicts that JSON can hold."""
    return {
        "profiles": [first.value, second.value],
        "features": [
            {
                "feature": feature.title,
                "setting": feature.asked_for_by,
                "does": feature.does,
                "endangers": feature.endangers,
                **{profile.value: asdict(feature.rulings[profile]) for profile in (first, second)},
            }
            for feature in differing_features(first, second)
        ],
    }
