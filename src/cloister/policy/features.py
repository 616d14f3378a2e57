"""The table of features: what this build can be asked for by a setting or a request field, and what each profile says of it.

One row has all that is known of a feature: what asks for it, what it does and endangers in an operator's words, the ruling of
every profile, and what to do where it is refused. The gate, `cloister policy show` and `docs/threats.md` read it here.

Implementations that are found by name (`types.registry`) need no row: their threat profile leads to their row of the matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cloister.policy.matrix import ONE_USER, row_of
from cloister.policy.verdict import Judgement, Profile, Ruling, Verdict, allow, mitigate, name_rulings, refuse
from cloister.types.threat import ThreatProfile


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that a person may ask for, or that is always there.

    Attributes:
        name: what `Policy.check` and `Policy.resolve` call it.
        slug: the row of the matrix that it belongs to.
        setting: the setting or request field that asks for it; empty for what is always there.
        title, does, endangers: in an operator's words.
        rulings: one for every profile.
        on_by_default: profiles in which it is on when nobody asks.
        instead: what to do where it is refused.
        threat: what its implementation leaves behind; None where code declares it elsewhere, or another feature does.
    """

    name: str
    slug: str
    setting: str
    title: str
    does: str
    endangers: str
    rulings: Mapping[Profile, Ruling]
    on_by_default: frozenset[Profile]
    instead: str
    threat: ThreatProfile | None = None

    def allowing(self) -> tuple[Profile, ...]:
        """Profiles that do not refuse it."""
        return tuple(p for p in Profile if self.rulings[p].verdict is not Verdict.REFUSED)


def _feature(
    name: str,
    *,
    row: str,
    setting: str,
    title: str,
    does: str,
    endangers: str,
    instead: str,
    part: str = "",
    open: Judgement | None = None,
    team: Judgement | None = None,
    private: Judgement | None = None,
    paranoid: Judgement | None = None,
    on_by_default: tuple[Profile, ...] = (),
    residue: str = "",
    where: tuple[str, ...] = (),
    attack: str = "",
    mitigations: tuple[str, ...] = (),
) -> Feature:
    """Makes a row of the table.

    Args:
        part: names the rules of a feature of which the profiles say something else than of its row of the matrix; such a
            feature has a judgement for each profile, others have the rulings of the row.
        residue, where, attack, mitigations: of the implementation, as in `ThreatProfile`; left out where code declares them
            elsewhere, or another feature does.
    """
    matrix_row = row_of(row)
    judged = {Profile.OPEN: open, Profile.TEAM: team, Profile.PRIVATE: private, Profile.PARANOID: paranoid}
    own = {profile: judgement for profile, judgement in judged.items() if judgement is not None}
    if len(own) != (len(Profile) if part else 0):
        raise ValueError(f"{name}: a feature that is judged by itself names its part, and every profile judges it")
    rulings = name_rulings(f"{row}.{part}", own) if part else matrix_row.rulings
    threat = ThreatProfile(matrix_row.name, matrix_row.threat.threats, residue, where, attack, mitigations)
    on, declared = frozenset(on_by_default), threat if mitigations else None
    return Feature(name, row, setting, title, does, endangers, rulings, on, instead, declared)


_FROM_CREDENTIAL = refuse("the class comes from the credential only")
_DRAFTS_DIE = "what a drafter keeps of a request is overwritten when the request ends"
_LENGTHS_SHOW = refuse(
    "sizes and times of what a plain server sends follow accepted lengths; only a sealed node's answers have a constant shape"
)
_PUBLIC_TEXT = mitigate("requests read it and write nothing; who starts the server answers for its text being public")
_NARROWED = mitigate(
    "a session is narrower than what its requests would share anyway, and ends five minutes after its last one"
)
_NO_SECRET = mitigate(
    "what is shared is in the release and nobody's secret, and stays once it is there: who comes first after a start "
    "can feel that, and nobody after"
)
_ONE_CACHE = refuse("who finds its prefix evicted learns that others were busy; each scope has a share of its own")
_ORDER_TELLS = refuse("who waits longer learns that others' prompts were in the cache; the order must not follow content")
_FRESH = mitigate("every request gets a scope of its own, and the server says so at start")
_TRUSTED_OPERATOR = allow("the operator is trusted with counts and times of single requests; no content, key or tenant")
_NO_SINGLE_REQUESTS = refuse("it shows counts and times of single requests, and only sums over many may leave")
_PSEUDONYM = mitigate(
    "a person is a keyed hash in all that is counted, under a key that each start draws anew; the issuer hears of no request"
)
_NAMES_PEOPLE = refuse("a token tells the server who asks; anonymous tokens, bought ahead, tell it only that somebody may")
_UNWANTED = refuse("what a user sent serves its request and is gone after it")
_SOMEBODY_CHOOSES = refuse("what runs is what somebody chose: a model that was named, or pulled before")
_WATCHED = "who watches the network reads lengths and times of packets, and from them parts of the text"
_RHYTHM = "the rhythm of packets shows how well the text could be guessed, and so parts of it"
_HABITS = "it shows the operator when each request came, how long it was and how long its answer"

_FEATURES: Final = (
    _feature(
        "runtime-adapters",
        row="closed-source",
        setting="runtime_adapters",
        title="Adapters at run time",
        does="lets operators load and unload LoRA adapters while the server runs",
        endangers="a model's name may stand for something else than what was published",
        part="runtime-adapters",
        open=allow(ONE_USER),
        team=mitigate("an operator's key is asked for, and prefix keys and fingerprints name an adapter by its weights"),
        private=refuse("what runs must be what was published, and an adapter changes what runs"),
        paranoid=refuse("what runs must be what was published, and an adapter changes what runs"),
        instead="leave the setting `runtime_adapters` out, and name adapters at start with `lora`",
        residue="weights of the adapter until it is unloaded",
        where=("memory of the engine process",),
        attack="an operator changes what a model's name stands for",
        mitigations=(
            "an operator's key, or no key on loopback",
            "the digest of the weights is in prefix keys and fingerprints",
        ),
    ),
    _feature(
        "default-model-download",
        row="closed-source",
        setting="model",
        title="Download of the default model",
        does="fetches the default model from the package index at the first start",
        endangers="the index and the network see that this machine starts to serve it",
        part="default-model-download",
        open=allow("one user on one machine; its digest is pinned, and the package index learns who asks for which package"),
        team=_SOMEBODY_CHOOSES,
        private=_SOMEBODY_CHOOSES,
        paranoid=_SOMEBODY_CHOOSES,
        on_by_default=(Profile.OPEN,),
        instead="name a model with the setting `model`, or run `cloister pull` before",
    ),
    _feature(
        "identity-tokens",
        row="priority",
        setting="oidc",
        title="Sign-in by an OpenID issuer",
        does="takes tokens of people from an issuer that you name, beside API keys",
        endangers="the issuer learns who signs in and when, and the server learns which requests are one person's",
        part="identity-tokens",
        open=_PSEUDONYM,
        team=_PSEUDONYM,
        private=_NAMES_PEOPLE,
        paranoid=_NAMES_PEOPLE,
        instead="leave the setting `oidc` out",
        residue="counts of tokens used today, by pseudonym",
        where=("memory of the front",),
        attack="whoever runs the issuer and the server can tell a person's requests apart from others'",
        mitigations=(
            "keyed hashes in place of names, under a key that each start draws anew",
            "no claim in a log or an error",
        ),
    ),
    _feature(
        "prefix-cache",
        row="prefix-cache",
        setting="prefix_cache",
        title="Prefix cache",
        does="keeps what was computed of a prompt, so that the next one that begins alike starts sooner",
        endangers="who shares the cache can tell from the time of an answer whether others sent the same words",
        on_by_default=(Profile.OPEN, Profile.TEAM, Profile.PRIVATE),
        instead="leave the setting `prefix_cache` out or switch it off",
    ),
    _feature(
        "session",
        row="prefix-cache",
        setting="request header `cloister-session`",
        title="Sessions",
        does="lets requests of one client reuse each other's prefixes for five minutes",
        endangers="the server can tell that these requests belong together",
        part="session",
        open=_NARROWED,
        team=_NARROWED,
        private=mitigate(
            "only by 256 secret bits that the client draws and sends; for five minutes after the last request; who sends the "
            "same bits twice lets this node link the two requests"
        ),
        paranoid=refuse("nothing is reused at all"),
        instead="leave the header `cloister-session` out",
    ),
    _feature(
        "release-prefixes",
        row="prefix-cache",
        setting="release_prefixes",
        title="Public system prompts",
        does="keeps what was computed of the system prompts that you name, for everybody",
        endangers="who asks first after a start can tell that nobody asked before",
        part="release",
        open=_NO_SECRET,
        team=_NO_SECRET,
        private=_NO_SECRET,
        paranoid=refuse("nothing is reused at all"),
        instead="leave the setting `release_prefixes` out",
    ),
    _feature(
        "one-cache",
        row="prefix-cache",
        setting="cache_scopes",
        title="One cache for all tenants",
        does="lets tenants compete for the memory of the prefix cache",
        endangers="a tenant whose prefix is gone learns that others were busy",
        part="one-cache",
        open=allow("a cache for all uses the memory best; whoever has a key here is trusted with how busy the others are"),
        team=_ONE_CACHE,
        private=_ONE_CACHE,
        paranoid=_ONE_CACHE,
        instead="leave the setting `cache_scopes` out, or give it the number of tenants",
    ),
    _feature(
        "cache-aware-order",
        row="prefix-cache",
        setting="scheduler lpm",
        title="Cached prompts first",
        does="lets requests whose prefix is in the cache go first",
        endangers="who waits longer learns that others' prompts were in the cache",
        part="order",
        open=allow("hits first is quickest for all; whoever has a key here is trusted with what the order tells"),
        team=_ORDER_TELLS,
        private=_ORDER_TELLS,
        paranoid=_ORDER_TELLS,
        instead="choose another setting `scheduler`",
    ),
    _feature(
        "client-priority",
        row="priority",
        setting="request field `priority`",
        title="Priority by request",
        does="lets a request say how urgent it is",
        endangers="anybody can push others back, or single out one person",
        part="client-field",
        open=allow("one user orders its own requests"),
        team=_FROM_CREDENTIAL,
        private=_FROM_CREDENTIAL,
        paranoid=_FROM_CREDENTIAL,
        on_by_default=(Profile.OPEN,),
        instead="leave the field `priority` out; the API key's own class counts",
    ),
    _feature(
        "streaming",
        row="speculation",
        setting="request field `stream`",
        title="Streaming",
        does="sends an answer while it is being written",
        endangers=_WATCHED,
        part="plain-stream",
        open=allow("the network is the user's own machine"),
        team=allow("the team trusts its network; a proxy with TLS hides the text, not sizes and times"),
        private=mitigate("no drafts are verified by a server that is not sealed, so packets tell no accepted lengths"),
        paranoid=refuse("sizes and times of packets follow the tokens; only what a sealed node answers has a constant shape"),
        on_by_default=(Profile.OPEN, Profile.TEAM, Profile.PRIVATE),
        instead="send the request with `stream` false, or sealed to a node",
    ),
    _feature(
        "sealed-streaming",
        row="speculation",
        setting="request field `stream` of a sealed request",
        title="Streaming from a sealed node",
        does="sends a sealed answer while it is being written",
        endangers=_WATCHED,
        part="sealed-stream",
        open=allow("the network is the user's own machine"),
        team=allow("sealed chunks hide the text; sizes and times are as on a plain stream"),
        private=mitigate(
            "frames of one size, one event a frame, one frame a tick; where drafts are verified, gaps would tell of them, so "
            "there a frame leaves on every tick from before the first token on, in a number from a few buckets"
        ),
        paranoid=mitigate("a frame on every tick from before the first token on, in a number from a few buckets"),
        on_by_default=tuple(Profile),
        instead="send the request with `stream` false",
    ),
    _feature(
        "speculation",
        row="speculation",
        setting="speculate",
        title="Speculation",
        does="drafts several tokens and verifies them in one step",
        endangers=_RHYTHM,
        part="plain-drafts",
        open=allow(ONE_USER),
        team=mitigate(f"{_DRAFTS_DIE}; who watches the team's network sees accepted lengths"),
        private=_LENGTHS_SHOW,
        paranoid=_LENGTHS_SHOW,
        instead="leave the setting `speculate` out, or serve from a sealed node",
    ),
    _feature(
        "sealed-speculation",
        row="speculation",
        setting="speculate of a sealed node",
        title="Speculation on a sealed node",
        does="drafts several tokens and verifies them in one step",
        endangers=_RHYTHM,
        part="sealed-drafts",
        open=allow(ONE_USER),
        team=mitigate(f"{_DRAFTS_DIE}; who watches the team's network sees accepted lengths"),
        private=mitigate(
            "only when asked for; then every answer has a constant shape: a frame on every tick from before the first token "
            f"on, in a number from a few buckets; {_DRAFTS_DIE}"
        ),
        paranoid=mitigate(f"only when asked for; every answer has a constant shape; {_DRAFTS_DIE}"),
        instead="leave the setting `speculate` out",
    ),
    _feature(
        "datastore",
        row="datastore-speculation",
        setting="datastore",
        title="Datastore of public text",
        does="looks drafts up in text that you name",
        endangers="who may ask the server can find out what is in that text",
        part="datastore",
        open=allow(ONE_USER),
        team=_PUBLIC_TEXT,
        private=_PUBLIC_TEXT,
        paranoid=refuse("drafts come of the request's own state only"),
        instead="leave the setting `datastore` out, and `rest` out of `speculate`",
    ),
    _feature(
        "keyless-bind",
        row="prefix-cache",
        setting="settings `host` and `api_keys`",
        title="Serving without API keys",
        does="answers whoever reaches an address that is not loopback",
        endangers="strangers use the server, and nothing tells one caller from another",
        part="keyless-bind",
        open=_FRESH,
        team=_FRESH,
        private=_FRESH,
        paranoid=_FRESH,
        on_by_default=tuple(Profile),
        instead="make API keys and pass their file as the setting `api_keys`",
    ),
    _feature(
        "request-log",
        row="profiling",
        setting="log_requests",
        title="Request log",
        does="writes a line for every request, with counts and times and no content",
        endangers=_HABITS,
        part="request-log",
        open=allow(ONE_USER),
        team=_TRUSTED_OPERATOR,
        private=_NO_SINGLE_REQUESTS,
        paranoid=_NO_SINGLE_REQUESTS,
        on_by_default=(
            Profile.OPEN,
            Profile.TEAM,
        ),
        instead="leave the setting `log_requests` out or switch it off",
    ),
    _feature(
        "traces",
        row="profiling",
        setting="otlp_endpoint",
        title="Traces",
        does="sends counts and times of every request to a collector, with no content",
        endangers=_HABITS,
        part="traces",
        open=allow(ONE_USER),
        team=_TRUSTED_OPERATOR,
        private=_NO_SINGLE_REQUESTS,
        paranoid=_NO_SINGLE_REQUESTS,
        instead="leave the setting `otlp_endpoint` out",
    ),
    _feature(
        "metrics-history",
        row="profiling",
        setting="`/metrics/history`",
        title="History of metrics",
        does="keeps the server's figures of the last day in memory, for the board",
        endangers="who opens the board sees when the server was used, also before they came",
        part="metrics-history",
        open=allow(ONE_USER),
        team=allow("what `/metrics` showed, by the minute for an hour and by ten minutes for a day, in memory only"),
        private=_NO_SINGLE_REQUESTS,
        paranoid=_NO_SINGLE_REQUESTS,
        on_by_default=(
            Profile.OPEN,
            Profile.TEAM,
        ),
        instead="read `/metrics`, which shows what the profile lets out",
    ),
    _feature(
        "tenant-figures",
        row="profiling",
        setting="`/metrics/tenants`",
        title="Figures of tenants",
        does="counts requests and tokens of each tenant, for operators",
        endangers="an operator sees who uses the server how much, and, who watches, when",
        part="tenant-figures",
        open=allow(ONE_USER),
        team=mitigate("an operator's key or role is asked for: counts since the start, in memory only, and no times"),
        private=_NO_SINGLE_REQUESTS,
        paranoid=_NO_SINGLE_REQUESTS,
        on_by_default=(
            Profile.OPEN,
            Profile.TEAM,
        ),
        instead="read `/metrics`, which shows what the profile lets out",
    ),
    _feature(
        "receipt",
        row="receipts",
        setting="request field `cloister-receipt` of a sealed request",
        title="Receipts",
        does="signs a statement about an answer for the client that asks for it",
        endangers="whoever gets hold of it can prove what was said, where and in which hour",
        instead="ask for no receipts",
        residue="a signed statement about one answer",
        where=("the client's disk",),
        attack="shown to others, or taken from the client, it proves what was said, and names node and hour of the request",
        mitigations=("only for who asks, sealed to the client", "salted digests in place of texts", "no time but the epoch's"),
    ),
    _feature(
        "image-inputs",
        row="images",
        setting="content parts of the type `image_url`",
        title="Images as input",
        does="decodes the images of a request and lets the model see them",
        endangers="who watches the network sees by a request's size that it has images, and how large they are",
        instead="send text only",
        residue="pixels until the request ends, embeddings until its prompt is computed",
        where=("host memory", "device memory"),
        attack="the size of a request shows an image and how large it is; a hostile file attacks its decoder",
        mitigations=(
            "size, type and number are checked before anything is decoded",
            "prefix keys name an image by its digest, inside the scope",
            "embeddings are overwritten when the prompt is past them",
        ),
    ),
    _feature(
        "files",
        row="storage",
        setting="files",
        title="Files and batches",
        does="keeps uploaded files and answers of batches on disk, encrypted, for 30 days at most",
        endangers="whoever has the disk and the key file can read them",
        instead="leave the setting `files` out, and send each request by itself",
        residue="files, batches and their answers, and conversations of /v1/responses, until they expire or are deleted",
        where=("SSD", "host memory"),
        attack="who has the disk and the key file reads them; an owner's API key reads them too",
        mitigations=("nothing on disk unless asked for", "AES-GCM under a key per owner", "30 days at most, an hour in memory"),
    ),
    _feature(
        "stored-responses",
        row="storage",
        setting="keep_responses",
        title="Kept responses",
        does="keeps conversations of /v1/responses in memory for an hour, so that they can go on",
        endangers="what was said outlives its request",
        part="responses",
        open=mitigate("in memory for an hour, found by its owner only, unless the request has `store` false"),
        team=mitigate("only where the operator asks for it: in memory for an hour, found by its tenant only"),
        private=_UNWANTED,
        paranoid=_UNWANTED,
        on_by_default=(Profile.OPEN,),
        instead="leave the setting `keep_responses` out, and send whole conversations",
    ),
    _feature(
        "page-storage",
        row="page-storage",
        setting="the page's setting `Keep on this device`",
        title="Conversations kept by the page",
        does="lets a person keep conversations in the browser",
        endangers="whoever uses the device or copies its disk can read them",
        instead="export a conversation as a file",
        residue="conversations with their files, presets and settings",
        where=("the client's disk",),
        attack="whoever uses the device or copies its disk reads them",
        mitigations=(
            "off until a person switches it on",
            "never the API key",
            "taken away when it is switched off",
            "never read where the profile refuses it",
        ),
    ),
)

ALWAYS_THERE: Final = (
    _feature(
        "paging",
        row="paging",
        setting="",
        title="Memory of requests",
        does="gives the memory of a request that ended to the next one",
        endangers="unwiped, it would hold what somebody said",
        instead="",
    ),
    _feature(
        "profiling",
        row="profiling",
        setting="",
        title="Metrics",
        does="shows counts and times of all requests at /metrics and on the page",
        endangers="figures about few requests tell the operator about single people",
        instead="",
    ),
)

FEATURES: Final[Mapping[str, Feature]] = {feature.name: feature for feature in _FEATURES}
"""What can be asked for, by name."""


def judged_apart() -> tuple[Feature, ...]:
    """Features with rulings of their own, other than those of their row."""
    return tuple(f for f in FEATURES.values() if f.rulings is not row_of(f.slug).rulings)


def declared_threats() -> dict[str, ThreatProfile]:
    """Returns what features leave behind that are not chosen by name from a registry, by their titles."""
    return {f.title[0].lower() + f.title[1:]: f.threat for f in FEATURES.values() if f.threat is not None}
