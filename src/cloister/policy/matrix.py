"""The threat matrix as data: every row, with the ruling of each profile.

A profile is a preset: `open` trusts the one person who uses the machine; `team` keeps the tenants of one server apart;
`private` requires every mitigation of the row; `paranoid` reuses nothing, moves no KV off the device and shows one traffic
shape to the network. `docs/threats.md` is generated from this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cloister.policy.verdict import (
    Judgement,
    Profile,
    Residue,
    Row,
    Steering,
    allow,
    mitigate,
    name_rulings,
    refuse,
)
from cloister.types.registry import Registry
from cloister.types.threat import Requirement, ThreatProfile

REQUIREMENTS = {
    Requirement.STATELESS: (
        "stateless computation",
        "what a user sent is used for the request only and deleted afterwards: in no log, metric, dump or swap, and in no "
        "cache that another user can detect",
    ),
    Requirement.ENFORCEABLE: (
        "enforceable guarantees",
        "code holds them, not promises; no outside part (balancer, storage, metrics) ever gets plain text",
    ),
    Requirement.NO_PRIVILEGED_ACCESS: (
        "no privileged runtime access",
        "no interface lets an operator bypass the guarantees, not even in an outage",
    ),
    Requirement.NON_TARGETABLE: (
        "non-targetability",
        "a captured set of nodes gets a user's request with the probability of its share of the capacity, and nothing can "
        "raise that",
    ),
    Requirement.VERIFIABLE: (
        "verifiable transparency",
        "what runs is what was published, and anyone can check it",
    ),
}

_DEVICE, _HOST, _SSD, _NODES, _NETWORK, _ROUTER, _CLIENT = (
    "device memory",
    "host memory",
    "SSD",
    "several nodes",
    "network",
    "router",
    "the client's disk",
)
ONE_USER = "one user on one machine: there are no others to protect it from"


def _row(
    slug: str, threat: ThreatProfile, *, open: Judgement, team: Judgement, private: Judgement,
    paranoid: Judgement, threat_note: str = "", residue: Residue | None = None, steering: Steering | None = None,
) -> Row:  # fmt: skip
    judged = {Profile.OPEN: open, Profile.TEAM: team, Profile.PRIVATE: private, Profile.PARANOID: paranoid}
    return Row(slug, threat, name_rulings(slug, judged), threat_note, residue, steering)


def _threat(
    row: str, letters: str, *, residue: str = "", where: tuple[str, ...] = (), attack: str = "", mitigation: str
) -> ThreatProfile:
    return ThreatProfile(row, frozenset(map(Requirement, letters)), residue, where, attack, (mitigation,))


_WIPE = mitigate("a freed block is wiped before another request can get it, in every profile")
_COPIES_COMPETE = refuse(
    "copies have no owner, so whether one is there depends on what other tenants' requests need, who could tell by its hits"
)
_COPIES_STEER = refuse("others' requests would decide which engine has a copy, and so where requests are quick")
_KNOWN_KEYS = mitigate(
    "an engine asks engines of its own front only, and by prefix keys, which are seeded by the scope: it can name only blocks "
    "of scopes whose requests it was given"
)
_DRAWN_TARGET = mitigate(
    "only among replicas of one server: by load to one that is drawn by capacity among those that qualify, else as new "
    "requests are routed; moves by load and drains are counted in the log and the metrics"
)
_DRAINED_ONLY = mitigate(
    "never by load: only if its replica is drained or lost, to another one of the same server, drawn by capacity; drains are "
    "counted in the log"
)
_AMONG_ENGINES = mitigate(
    "between engines that know a secret drawn at each start: on one machine through sockets of one user, else over mutual TLS"
)
_NO_PULLING = refuse("no cache is pulled: in a sealed node KV moves only with its own request (disaggregated prefill/decode)")
_ATTESTED_PEERS = mitigate(
    "inside a sealed node only, whose engines one statement attests: AES-256-GCM under keys of each connection, in locked "
    "memory and gone with it; a source gives KV of a request that goes on elsewhere, and of no other"
)
KV_STAYS = refuse("KV never leaves the engine that computed it")
_COPIES_STAY = refuse(
    "only sessions would use it, and copies of KV on their way there and back are not overwritten before their memory is reused"
)
_CLASS = mitigate("the class is the credential's; beside it arrival, lengths and work done decide, never content")
_PUBLIC_CLASS = mitigate(
    "the class is the credential's public class; beside it arrival, lengths and work done decide, never content, and the "
    "engine sees nothing else that identifies the user"
)
_COUNTED_LENGTHS = mitigate(
    "learned from counts of all tenants together, never from text, tenant or key; a wrong prediction refuses nothing while a "
    "slot is free"
)
_STEERED_BY_LENGTHS = refuse(
    "lengths are learned from answers, so others' answers would decide where a request runs; replicas are drawn by capacity"
)
_DRAWN_FLIP = mitigate(
    "the replica is drawn by capacity among those that are idle; flips are counted in the log and the metrics; the operator is "
    "trusted with all of them"
)
STEERED = refuse("a replica is drawn by capacity alone, so that nobody can steer a request; affinity is denied")
_BY_CAPACITY = mitigate("a replica is drawn by capacity: neither text, length nor load decides, and affinity is denied")
_COUNTS = mitigate(
    "counts on the allow-list only, updated once a threshold of further requests has ended, and with keys for operators only; "
    "on a sealed node counts per minute, with noise in each and none of few"
)
_REQUEST_STATE = mitigate("state per request, or a datastore of public text")
_DRAFTS_DIE = "drafts live no longer than their request"
_PAGE_STORAGE = mitigate("only while the user of the page has switched it on, and without the API key")
_RECEIPT = mitigate("only on request, sealed to the client; salted digests, and no time but the epoch's hour")
_STEP_TIMES = "learns from token counts and step times only, and keeps them in memory"
_STEP_TIMES_SHOWN = mitigate(f"{_STEP_TIMES}; metrics show sums of all requests together")
_STEP_TIMES_HIDDEN = mitigate(f"{_STEP_TIMES}; no metric shows any of it")

_KEPT = mitigate("off by default; accessible to its owner only, encrypted on disk, and deleted when it expires")
_GONE = refuse("what a user sent is used for its request only and deleted afterwards")

_IMAGES_CHECKED = mitigate(
    "size, type and number are checked before anything is decoded; an image's KV is found inside its tenant's scope only"
)
_IMAGES_COVERED = mitigate(
    "only in a sealed request of a size class, which texts use as well, and whose answer lasts as long for both; decoded "
    "behind the seal, in a process without the request"
)
_TEMPLATE = mitigate(
    "the template has had no request, and is replaced after three crashes of its engines, so that addresses cannot be learnt "
    "crash by crash"
)
_OWN_ADDRESSES = refuse("every engine is executed anew, with addresses of its own")

ROWS: tuple[Row, ...] = (
    _row(
        "paging",
        _threat(
            "paging, continuous batching, chunked prefill, TP, SP", "",
            residue="KV blocks until free, activations until overwritten", where=(_DEVICE,),
            attack="reuse of an unwiped block",
            mitigation="wipe on free, before the block can be given to another request; native: wipe of the step's "
            "buffers when no sequence is left; torch: their memory is used again by later steps",
        ),
        open=_WIPE, team=_WIPE, private=_WIPE, paranoid=_WIPE,
    ),
    _row(
        "prefix-cache",
        _threat(
            "prefix cache", "SE", residue="token KV", where=(_DEVICE, _HOST),
            attack="data leak, inference by timing, access pattern",
            mitigation="scope: request < session < tenant < public; a salt from the credential, expiry; no sharing between "
            "scopes, quotas per scope so that eviction reveals nothing; public prefixes only from the release",
        ),
        residue=Residue(
            "prefix cache", "KV by token", (_DEVICE, _HOST), "expiry, isolation",
            leak=True, inference=True, access_pattern=True,
        ),
        open=mitigate("one scope on loopback without API keys; with keys one scope per tenant; else one per request"),
        team=mitigate("one scope per tenant, salted from its credential; without a credential one per request"),
        private=mitigate("one scope per request, salted at random; a session by its secret; prefixes of the release"),
        paranoid=refuse("nothing is reused at all"),
    ),
    _row(
        "offload",
        _threat(
            "disk or host offload", "SE", residue="KV", where=(_SSD, _HOST), attack="data leak",
            mitigation="AES-GCM under a key that lives only in the node's memory and dies with the scope; no plain text "
            "is ever written",
        ),
        residue=Residue("disk offload", "KV", (_SSD,), "encryption", leak=True),
        open=allow(ONE_USER),
        team=mitigate("AES-GCM under a key per scope that lives only in the node's memory"),
        private=_COPIES_STAY,
        paranoid=refuse("KV never leaves the device"),
    ),
    _row(
        "duplication",
        _threat(
            "duplication", "ST", residue="KV", where=(_NODES,), attack="data leak, difference analysis; raises hits",
            mitigation="copies share one lease: expire together, keys revoked together; refused where others could notice them",
        ),
        residue=Residue(
            "duplication", "KV", (_DEVICE, _HOST), "synchronised expiry", leak=True, difference=True,
        ),
        steering=Steering(
            "duplication", "copies the target's cache to a captured node", "copies others' caches away from that node"
        ),
        open=allow(ONE_USER), team=_COPIES_COMPETE, private=_COPIES_STEER,
        paranoid=refuse("copies exist only for reuse, and this profile reuses nothing"),
    ),
    _row(
        "pulling",
        _threat(
            "pulling (cache fetched by a node)", "SET", residue="KV", where=(_NODES,), attack="raises hits",
            mitigation="only among engines of one front, by prefix keys that are seeded by the scope; refused where nobody "
            "has attested the engines to each other",
        ),
        steering=Steering("pulling", "pulls from the target's cache"),
        open=allow(ONE_USER), team=_KNOWN_KEYS, private=_NO_PULLING,
        paranoid=refuse("only caches are pulled, and this profile reuses nothing"),
    ),
    _row(
        "migration",
        _threat(
            "request migration", "T", attack="steer in or out",
            mitigation="only among replicas of one server, target drawn by capacity, counted in the log; by load only where "
            "the profile allows that",
        ),
        steering=Steering("migration", "moves the target in", "moves others out"),
        open=allow(ONE_USER), team=_DRAWN_TARGET, private=_DRAINED_ONLY, paranoid=_DRAINED_ONLY,
    ),
    _row(
        "disaggregation",
        _threat(
            "disaggregated prefill/decode", "", residue="KV in flight", where=(_NETWORK,), attack="tap",
            mitigation="sockets of one user on one machine, else mutual TLS, between engines that know a secret of one front; "
            "where peers must be attested, encrypted links inside one sealed node",
        ),
        threat_note="T with flip",
        open=allow(ONE_USER), team=_AMONG_ENGINES, private=_ATTESTED_PEERS, paranoid=KV_STAYS,
    ),
    _row(
        "priority",
        _threat(
            "priority scheduling", "T", attack="raise the target's priority",
            mitigation="classes come from the credential's public class, never from content or identity",
        ),
        steering=Steering("priority", "raises the target", "lowers others"),
        open=allow(ONE_USER), team=_CLASS, private=_PUBLIC_CLASS, paranoid=_PUBLIC_CLASS,
    ),
    _row(
        "prediction",
        _threat(
            "request-level prediction", "T", residue="predictor state", where=(_HOST,), attack="learns content",
            mitigation="learned from counts of answers, never from text, tenant or key; refused where nothing of others may "
            "decide where a request runs",
        ),
        open=allow(ONE_USER), team=_COUNTED_LENGTHS, private=_STEERED_BY_LENGTHS, paranoid=_STEERED_BY_LENGTHS,
    ),
    _row(
        "router",
        _threat(
            "machine-level scheduler", "ET", residue="cache map", where=(_ROUTER,), attack="content-specific routing",
            mitigation="remembers prompts by prefix keys only, which are seeded by the scope; by capacity alone, without "
            "affinity, where nobody may steer a request",
        ),
        open=allow(ONE_USER),
        team=mitigate("what was sent where is remembered by prefix keys only, which are seeded by the scope"),
        private=_BY_CAPACITY, paranoid=_BY_CAPACITY,
    ),
    _row(
        "flip",
        _threat(
            "instance flip", "T", attack="turn a captured node into a prefill node",
            mitigation="flips drawn by capacity among idle replicas and counted in the log; refused where nobody may steer "
            "a request",
        ),
        steering=Steering("instance flip", "makes a captured node a prefill node"),
        open=allow(ONE_USER), team=_DRAWN_FLIP, private=STEERED, paranoid=STEERED,
    ),
    _row(
        "profiling",
        _threat(
            "global profiling", "P", residue="statistics", where=(_HOST,), attack="operator view into content",
            mitigation="counts only, from an allow-list, with k-anonymity thresholds",
        ),
        open=allow(ONE_USER),
        team=allow("the team trusts its operator; metrics are counts and times, with no content, key or tenant in a label"),
        private=_COUNTS, paranoid=_COUNTS,
    ),
    _row(
        "datastore-speculation",
        _threat(
            "context- or datastore-based speculation (REST, Token Recycling, LLMA)", "S",
            residue="tokens of earlier users", where=(_DEVICE, _HOST), attack="data leak, inference",
            mitigation="state per request only, or a datastore of public text",
        ),
        residue=Residue(
            "datastore speculation", "tokens", (_DEVICE, _HOST), "state per request, small model instead",
            leak=True, inference=True,
        ),
        open=allow(ONE_USER), team=_REQUEST_STATE, private=_REQUEST_STATE,
        paranoid=mitigate("state per request only"),
    ),
    _row(
        "speculation",
        _threat(
            "speculation in general", "S",
            residue="packet sizes and times reveal accepted lengths; drafts that were cached", where=(_NETWORK, _DEVICE),
            attack="traffic analysis, leak",
            mitigation="constant-shape streaming: padded frames and fixed cadence and bucketed length together; "
            "drafts live no longer than the request",
        ),
        open=allow(ONE_USER),
        team=mitigate(_DRAFTS_DIE),
        private=mitigate(f"constant-shape streaming while drafts are verified; {_DRAFTS_DIE}"),
        paranoid=mitigate(f"constant-shape streaming of every answer; {_DRAFTS_DIE}"),
    ),
    _row(
        "tuning",
        _threat(
            "adaptive tuning of the optimisations", "ST", residue="what the tuner learned", where=(_HOST,),
            attack="infers the users' scenario",
            mitigation="tuned by token counts and step times only, never by content; what leaves the node is counts, where "
            "the profile allows them",
        ),
        open=allow(ONE_USER), team=_STEP_TIMES_SHOWN, private=_STEP_TIMES_HIDDEN, paranoid=_STEP_TIMES_HIDDEN,
    ),
    _row(
        "system-key",
        _threat(
            "key held by the whole system", "ET", attack="one capture opens all",
            mitigation="no system-wide key: every node its own, short-lived",
        ),
        open=allow("one machine is the whole system"),
        team=refuse("every node has a key of its own, short-lived"),
        private=refuse("every node has a key of its own, short-lived"),
        paranoid=refuse("every node has a key of its own, short-lived"),
    ),
    _row(
        "closed-source",
        _threat("closed source", "V", mitigation="the project is open, builds reproduce"),
        open=allow(ONE_USER),
        team=allow("the team trusts its operator with what runs"),
        private=refuse("what runs must be what was published"),
        paranoid=refuse("what runs must be what was published"),
    ),
    _row(
        "receipts",
        _threat(
            "receipts of answers", "T", residue="a signed statement about one answer", where=(_CLIENT,),
            attack="disclosed by or stolen from the client, it proves what was said, and names node and hour of the request",
            mitigation="only on request, sealed to the client, in an answer shaped as any other; the node keeps nothing; "
            "salted digests in place of texts; no time but the epoch's",
        ),
        open=allow(ONE_USER), team=_RECEIPT, private=_RECEIPT,
        paranoid=refuse("what can be proved can be demanded: nobody can later prove what was said here"),
    ),
    _row(
        "images",
        _threat(
            "images as input", "S", residue="pixels until the request ends, embeddings until its prompt is computed",
            where=(_HOST, _DEVICE), attack="the size of a request shows an image and how large it is; the time to the first "
            "token shows that its tower computed; a hostile file attacks its decoder",
            mitigation="size, type and number are checked before anything is decoded; prefix keys name an image by its digest, "
            "inside the scope; embeddings are overwritten when the prompt is past them; private: only in a size class, whose "
            "answers have a constant cadence from before the first token on; decoded in a forked process without the request",
        ),
        open=allow(ONE_USER), team=_IMAGES_CHECKED, private=_IMAGES_COVERED,
        paranoid=refuse("the size class of a request with an image is seen, and the steps of others become slower while its "
                        "tower computes"),
    ),
    _row(
        "storage",
        _threat(
            "stored requests and answers", "SE", residue="files, batches and conversations until they expire",
            where=(_SSD, _HOST), attack="data leak from a disk or to another user",
            mitigation="nothing touches a disk unless the operator names a place for it; accessible to its owner only; "
            "encrypted with AES-GCM under a key per owner; everything expires",
        ),
        open=_KEPT, team=_KEPT, private=_GONE, paranoid=_GONE,
    ),
    _row(
        "page-storage",
        _threat(
            "conversations that the web page keeps", "S", residue="conversations with their files, presets and settings",
            where=(_CLIENT,), attack="anyone who uses the device or copies its disk can read them",
            mitigation="written only while the user has switched it on, and never with an API key; deleted "
            "when that is switched off",
        ),
        open=allow(ONE_USER), team=_PAGE_STORAGE, private=_PAGE_STORAGE,
        paranoid=refuse("content is gone when the page is closed; only the user can export it"),
    ),
    _row(
        "clones",
        _threat(
            "engines forked from a template", "E",
            attack="engines have the same addresses, before and after a crash: what an attacker learns of the memory of one, "
            "crash by crash or from an answer, holds for the others",
            mitigation="the template holds the public model and no request, and has one thread; it is replaced after three "
            "crashes; private: refused",
        ),
        open=allow(ONE_USER), team=_TEMPLATE, private=_OWN_ADDRESSES, paranoid=_OWN_ADDRESSES,
    ),
    _row(
        "idle",
        _threat(
            "engines that end while idle", "S",
            attack="the time of a first answer shows whether anybody has used the server lately",
            mitigation="off by default; private: refused",
        ),
        open=allow(ONE_USER),
        team=mitigate("off by default; it shows only that no tenant had a request for the whole time that the operator set"),
        private=refuse("the time of an answer must not show whether others were there"),
        paranoid=refuse("the time of an answer must not show whether others were there"),
    ),
)  # fmt: skip

_BY_NAME = {row.name: row for row in ROWS}
_BY_SLUG = {row.slug: row for row in ROWS}


def find_row(name: str) -> Row:
    """Returns the row of a feature's `ThreatProfile.row`.

    Raises:
        LookupError: the matrix has no such row, so the profiles have no ruling for the feature.
    """
    if name not in _BY_NAME:
        raise LookupError(f"the threat matrix has no row {name!r}; rows: {'; '.join(_BY_NAME)}")
    return _BY_NAME[name]


def row_of(slug: str) -> Row:
    """Returns the row with this `slug` (KeyError if there is none)."""
    return _BY_SLUG[slug]


# Features of this build: every registered implementation and declared feature, by its row of the matrix.


@dataclass(frozen=True, slots=True)
class Entry:
    """One feature of this build.

    Attributes:
        kind: the registry's kind, or "feature" for one that is not selected by name.
    """

    kind: str
    name: str
    threat: ThreatProfile

    @classmethod
    def of(cls, registry: Registry[Any], name: str) -> Entry:
        """Returns the entry of an implementation (ConfigError if there is none)."""
        return cls(registry.kind, name, registry.threat(name))


def gather(registries: Iterable[Registry[Any]], declared: Mapping[str, ThreatProfile]) -> tuple[Entry, ...]:
    """Collects the features that the packages registered and declared.

    Args:
        declared: name -> threat profile of features that are not selected by name.

    Raises:
        LookupError: an entry's row is not in the matrix.
        ValueError: an entry declares other threats than its row.
    """
    entries = [Entry(registry.kind, name, threat) for registry in registries for name, threat in registry]
    entries += [Entry("feature", name, threat) for name, threat in declared.items()]
    for entry in entries:
        if entry.threat.threats != find_row(entry.threat.row).threat.threats:
            raise ValueError(f"the {entry.kind} {entry.name!r} and its row {entry.threat.row!r} differ in threats")
    return tuple(entries)


def rows_in_build(entries: Iterable[Entry]) -> tuple[Row, ...]:
    """Rows of which this build has at least one feature, in the matrix's order."""
    present = {entry.threat.row for entry in entries}
    return tuple(row for row in ROWS if row.name in present)
