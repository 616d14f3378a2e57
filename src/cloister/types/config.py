"""Configuration as frozen dataclasses, resolved once by a pure function that explains each value.

No I/O, no environment. Flags, documentation and the config file's keys are generated from the fields of these classes.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from cloister.types.errors import ConfigError
from cloister.types.refusals import Refusals

C = TypeVar("C")

NO_DRAFTER: Final = "none"
AUTO_DRAFTER: Final = "auto"
"""Values of `speculate` that are not drafters."""
DRAFTER_FILES: Final = {
    "draft_model": "draft_model", "spec_infer": "draft_model", "long_spec": "draft_model", "rest": "datastore",
}  # fmt: skip
"""Drafter -> the setting that names its files."""


def setting(
    default: Any, help: str, *, choices: Sequence[str] = (), low: float | None = None, high: float | None = None
) -> Any:
    """Declares one setting: its default, a one-sentence description, and its valid values."""
    return field(default=default, metadata={"help": help, "choices": tuple(choices), "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. None: chosen at start from the model and the machine."""

    model: str = setting(
        "cloister-5m",
        "Name of an embedded, pulled or catalogue model, model directory, GGUF file, or hub name; unset, `serve`, `run` and"
        " `chat` take smollm2-135m if it is on disk or the profile permits its download.",
    )
    backend: str | None = setting(
        None, "Back end, native or torch; unset, native on a CPU if it has kernels for the model, else torch."
    )
    device: str | None = setting(None, "Where it computes.", choices=("cpu", "cuda"))
    dtype: str | None = setting(
        None,
        "Number format of weights that are not quantised, and of activations; unset, bfloat16 (float32 on torch on a CPU).",
        choices=("float32", "bfloat16"),
    )
    quant: str = setting("none", "Quantization of matrices on load: none, int8, int4, qoq or nvfp4.")
    quant_method: str = setting(
        "auto",
        "How `quant` chooses codes: `rtn` rounds to nearest, `gptq` calibrates on shipped text, once for each model (the"
        " weights cache keeps it); `auto` is gptq for 4 bits if the model has the shape and size for it.",
        choices=("auto", "rtn", "gptq"),
    )
    kv_dtype: str | None = setting(
        None,
        "Number format of KV; unset, the one that suits `quant`, else `dtype`.",
        choices=("float32", "bfloat16", "int8", "int4", "kivi2"),
    )
    kv_layout: str = setting(
        "paged",
        "`paged`: sequences read KV through block tables; `virtual` (Linux, CPU): at addresses in a row, to which blocks are"
        " mapped as they are allocated.",
        choices=("paged", "virtual"),
    )
    strict_config: bool = setting(
        False,
        "Refuse a model whose config.json has unknown fields; else they are ignored, with a warning.",
    )
    numerics: str = setting(
        "exact",
        "`exact`: answers do not depend on other requests in the batch; `fast`: libraries (CUDA) and KV tiers (CPU) that cannot"
        " guarantee it.",
        choices=("exact", "fast"),
    )
    weights_cache: str = setting(
        "~/.cache/cloister", "Cache directory for packed weights, which make the next start faster; empty disables it."
    )
    weights_cache_mb: float = setting(
        65536.0, "Disk space for packed weights, in MiB; the least recently used ones are evicted.", low=0
    )
    num_threads: int | None = setting(None, "Threads for arithmetic.", low=1)
    max_model_len: int | None = setting(None, "Longest prompt and answer together, in tokens.", low=1)
    max_prefill_only_len: int | None = setting(
        None,
        "Longest prompt of a request that ends with it (score, vector, one token), in tokens. One above max_model_len is "
        "computed layer by layer, with KV of one layer at a time.",
        low=1,
    )
    default_max_tokens: int = setting(
        2048,
        "Longest answer if a request sets no limit, in tokens; 0: as long as the context window permits.",
        low=0,
    )
    block_size: int = setting(16, "Positions in one KV block.", low=1, high=256)
    kv_memory_mb: float | None = setting(None, "Memory for KV blocks, in MiB.", low=0)
    memory_share: float = setting(
        1.0, "Share of the available memory that the engine plans with; less if other programs need some.", low=0.001, high=1
    )
    max_num_seqs: int = setting(64, "Sequences that run at once.", low=1)
    max_batched_tokens: int | None = setting(None, "Tokens in one step; unset, 1024 on a CPU and 2048 on a GPU.", low=1)
    target_step_ms: float | None = setting(
        None, "Time limit of a step; unset, a step may take `max_stall` times its decode part.", low=0
    )
    max_stall: float = setting(1.7, "How much prefill may stretch a step that also decodes, as a ratio.", low=1)
    stall_floor_ms: float = setting(
        45.0, "A step of this time is short enough for any stream: prefill may fill it, whatever `max_stall`.", low=0
    )
    scheduler: str = setting(
        "fcfs",
        "Whose tokens are computed first: fcfs (by arrival), priority (by the key's class, then deadline), fair (the tenant"
        " that got least), lpm (most of its prompt cached), prefill_only (shortest prefill), mlfq (short requests), cfs (fewest"
        " tokens so far), reorder (by arrival, but what fits passes what does not), qoe (whose reader gains most) or static"
        " (whole batches, to compare with).",
    )
    prefix_cache: bool | None = setting(None, "Reuse KV of equal prefixes inside a scope; unset, the profile's default.")
    release_prefixes: str | None = setting(
        None,
        "File of public system prompts (a JSON list): all users share their KV, which is never evicted.",
    )
    cache_scopes: int | None = setting(
        None,
        "Tenants or sessions with their own share of the prefix cache, together at most half of the KV memory;"
        " 0: one shared cache, in which users can infer others' activity; unset, one for each tenant, or 16 sessions.",
        low=0,
    )
    kv_transfer: str | None = setting(
        None,
        "How replicas load KV from each other: shm (shared memory of one machine), unix (its sockets), tls://HOST:0 (mutual"
        " TLS, each on a port of its own), or shm and tls with a comma between; with `on` ray shm,tls; mooncake (with the extra"
        " `mooncake`, profile open only); unset, they compute it.",
    )
    kv_tier: str | None = setting(
        None,
        "Where KV that the prefix cache evicts is kept, encrypted: host:SIZE (with K, M, G or T); shared:SIZE, where each"
        " replica stores this much and loads from all; peer:SIZE, where it also uses memory that the next replica does not"
        " need; disk:PATH[,SIZE]; or one in memory and a disk, such as host:SIZE+disk:PATH[,SIZE], where the disk gets what"
        " memory evicts; unset, nowhere.",
    )
    kv_tier_codec: str | None = setting(
        None,
        "How tiers compress KV. lossless: about 1.5 times; auto: lossless if that makes loads quicker, else not at all"
        " (raw). With --numerics fast also fine, medium and coarse (about 3.6, 4.8 and 6.5 times), which change answers a"
        " little where KV was evicted; auto-lossy: the most exact level, raw included, that loads about as fast as possible."
        " Unset, not at all.",
        choices=("auto", "lossless", "fine", "medium", "coarse", "auto-lossy"),
    )
    kv_tier_admission: str | None = setting(
        None,
        "Which blocks a full tier stores. always: each, in place of the least recently used one; tinylfu: those that"
        " are used more often than the one that they would replace; auto: the one of both with more hits. Unset, auto.",
        choices=("always", "tinylfu", "auto"),
    )
    profile: str | None = setting(
        None,
        "Privacy profile; unset, `open` on loopback without API keys, else `team`.",
        choices=("open", "team", "private", "paranoid"),
    )
    lora: str | None = setting(None, "LoRA adapters to load at start: NAME=DIRECTORY, comma-separated.")
    max_loras: int | None = setting(None, "Adapters at once; unset, those of `lora`, and 4 with `runtime_adapters`.", low=1)
    max_lora_rank: int | None = setting(None, "Largest rank of an adapter; unset, that of `lora`'s, and at least 16.", low=1)
    runtime_adapters: bool = setting(False, "Let operators load and unload LoRA adapters while the server runs.")
    pooling: str | None = setting(
        None,
        "Pooling of embeddings over a text's tokens; unset, as in the model's files, else mean. cls: of encoders only.",
        choices=("last", "mean", "cls"),
    )
    speculate: str | None = setting(
        None,
        "Drafters, whose tokens the model verifies, several a step: none, auto (those available, whenever faster), or names,"
        " comma-separated: ngram, rest, medusa, blockwise, draft_model, long_spec, lookahead, mtp, recycling, spec_infer;"
        " unset, auto if a setting of drafters is given, else none.",
    )
    draft_model: str | None = setting(
        None,
        "Draft models: an embedded model's name, a directory or a hub name, comma-separated; unset, those"
        " in the model's directory under `drafters`.",
    )
    draft_tokens: int | None = setting(
        None, "Tokens to draft in a step for each sequence; unset, adapted to acceptance and speed.", low=1, high=64
    )
    datastore: str | None = setting(None, "Directory of the datastore of public text for the drafter `rest`.")
    max_waiting: int = setting(1024, "Longest queue of waiting requests; further ones get 429.", low=0)
    stall_timeout_s: float = setting(
        5.0,
        "`/health` fails after this time (at least 20 steps) without a step while a request waits; after twice as long the"
        " engine is restarted.",
        low=0.01,
    )
    request_timeout_s: float = setting(600.0, "Deadline of a request, from arrival to its last token.", low=0.001)

    @property
    def speculates(self) -> bool:
        """Whether drafts may be verified; False until a profile has set an unset `speculate`."""
        return self.speculate not in (None, NO_DRAFTER)

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """The drafters that `speculate` names; empty if the engine chooses."""
        return _names(self.speculate) if self.speculates and self.speculate != AUTO_DRAFTER else ()


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the HTTP front."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0 picks a free one.", low=0, high=65535)
    replicas: int = setting(
        1, "Engines that serve the model, each with its own KV cache; they share the threads and the memory.", low=1, high=256
    )
    max_replicas: int | None = setting(
        None,
        "Most replicas: they are added while requests wait, and removed when fewer are enough. Replaces `replicas`.",
        low=2,
        high=256,
    )
    min_replicas: int | None = setting(
        None,
        "Fewest replicas, with max_replicas; 0: the last engine ends too when it has had no request for downscale_delay_s;"
        " unset, 1.",
        low=0,
        high=256,
    )
    upscale_delay_s: float = setting(1.0, "How long replicas must be busy until another one is added.", low=0.0)
    downscale_delay_s: float = setting(60.0, "How long fewer replicas must be enough until one is removed.", low=0.1)
    router: str | None = setting(
        None,
        "How requests are divided among replicas: least_load, least_work (where a slot is free soonest), prefix_aware (where"
        " the prompt is cached), conductor (where the first token comes soonest; it refuses what would be too late),"
        " round_robin or capacity_random (drawn, so that nobody can steer a request); unset, least_load, or capacity_random if"
        " the profile allows no other.",
    )
    prefill: int = setting(
        0, "Replicas that compute prompts only; after the first token others continue. The rest are mixed.", low=0, high=256
    )
    decode: int = setting(0, "Replicas that continue answers after the first token.", low=0, high=256)
    rebalance: bool = setting(
        False, "Move running requests from busy replicas to idle ones, and flip roles, as the load changes."
    )
    standby: int = setting(
        0, "Replicas among these that are ready but get no requests until another one is lost.", low=0, high=255
    )
    replicate_hot_prefixes: bool = setting(
        False,
        "Copy the KV of prefixes that many requests share from the replica that has it to replicas with less to do; needs"
        " kv_transfer.",
    )
    max_ttft_s: float | None = setting(
        None,
        "Refuse requests (429) whose first token would come later than this, as the router `conductor` predicts; unset, later"
        " than their own deadline.",
        low=0.001,
    )
    slow_replicas: str | None = setting(
        None,
        "What happens to a replica whose steps take twice as long as those of the others: avoid (it gets no requests until it"
        " is fast again) or report; unset, avoid if the profile allows it.",
        choices=("avoid", "report"),
    )
    verify_replay: float = setting(
        0.0,
        "Share of finished greedy or seeded requests that another replica computes again; if tokens differ, a third one"
        " decides, and the odd one gets no more requests.",
        low=0.0,
        high=1.0,
    )
    on: str = setting(
        "local",
        "Where replicas run: as processes of this machine, or on the machines of a Ray cluster (extra `ray`).",
        choices=("local", "ray"),
    )
    ray_address: str | None = setting(
        None, "Ray cluster to join, HOST:PORT or auto; unset, `on` ray starts a Ray of this machine alone, on loopback."
    )
    fork_server: bool | None = setting(
        None,
        "Fork engines from a template that has the model in memory: a further replica, or the next engine after a crash,"
        " takes milliseconds and shares the weights (Linux, native back end); unset, the profile's default.",
    )
    idle_timeout_s: float | None = setting(
        None, "End engines that had no request for this long; the next request starts them again; unset, they stay.", low=0.001
    )
    idle_keeps: str | None = setting(
        None,
        "What stays in memory while no engine runs: `weights` in the template, for a start in milliseconds, or `nothing`;"
        " unset, nothing.",
        choices=("nothing", "weights"),
    )
    served_model_name: str | None = setting(None, "Model names for clients, comma-separated; unset, the model's own.")
    api_keys: str | None = setting(None, "File of hashed API keys (`cloister keys` writes it); unset, none are required.")
    oidc: str | None = setting(
        None, "File (TOML) of an OpenID issuer whose tokens are accepted like API keys; unset, none. Needs the extra `oidc`."
    )
    tool_parser: str | None = setting(
        None,
        "Format of the model's tool calls; unset, detected from its chat template.",
        choices=(
            "hermes",
            "llama3",
            "mistral",
            "mistral_args",
            "phi4",
            "granite",
            "deepseek",
            "deepseek_v31",
            "qwen3_coder",
            "kimi_k2",
            "glm45",
            "minimax_m2",
            "harmony",
        ),
    )
    reasoning_parser: str | None = setting(
        None,
        "Format of the model's reasoning; unset, detected from its chat template; none leaves it in the answer.",
        choices=("think", "magistral", "harmony", "none"),
    )
    max_request_kb: int = setting(4096, "Largest request body, in KiB.", low=1)
    max_images: int = setting(8, "Most images in one request, for a model that sees; 0 refuses them.", low=0)
    remote_images: bool = setting(
        False, "Fetch images that requests name by https:// URLs, from public addresses; else only data URLs are read."
    )
    strict_fields: bool = setting(
        False,
        "Refuse a request with an unknown field; else it is ignored, and the reply's header"
        " `cloister-ignored-fields` names it.",
    )
    max_n: int = setting(64, "Most sequences (`n`) that one request may ask for.", low=1)
    page: bool = setting(True, "Serve the web page at `/`.")
    max_connections: int = setting(2048, "Most connections at once; a further one replaces an idle one, or gets 503.", low=1)
    max_unread_mb: int = setting(
        512,
        "Most MiB of replies held for clients that have not read them, an eighth of it for one; beyond it the slowest end.",
        low=16,
    )
    allowed_origins: str | None = setting(
        None, "Origins of other web pages that may use the API (CORS), comma-separated, or *; unset, none."
    )
    certfile: str | None = setting(None, "Certificate for TLS, with its chain, in PEM; unset, plain HTTP.")
    keyfile: str | None = setting(None, "Private key of the certificate, in PEM; unset, it is in `certfile` too.")
    log_format: str = setting("text", "Format of log lines.", choices=("text", "json"))
    log_requests: bool | None = setting(
        None, "Log a line for every request, with counts and times and no content; unset, the profile's default."
    )
    log_clients: bool = setting(False, "Include the client's address in log lines of requests.")
    otlp_endpoint: str | None = setting(None, "Address of an OpenTelemetry collector (OTLP over HTTP) that gets traces.")
    sealed: bool = setting(
        False,
        "Start as a sealed node: hardened before any library loads, no program executed, no outgoing calls; the profile is then"
        " `private` unless set.",
    )
    attester: str = setting(
        "software",
        "Attester of a sealed node: the processor, or `software`, which proves nothing and which clients refuse by default.",
        choices=("software", "sev-snp", "tdx"),
    )
    attest_gpus: bool = setting(False, "Require attestation of NVIDIA GPUs in confidential mode too.")
    amd_certificates: str | None = setting(
        None,
        "Directory with AMD's certificates of this processor (vcek and ask, or vlek and asvk; ark, crl), if the host has no"
        " table of them.",
    )
    intel_collateral: str | None = setting(
        None, "File with Intel's collateral for this processor, JSON; read for each key of a sealed node."
    )
    nvidia_collateral: str | None = setting(
        None,
        "Directory with NVIDIA's signed files for the GPUs: RIM files (*.swidtag, *.xml), OCSP responses (*.ocsp) and CRLs"
        " (*.crl); read for each key of a sealed node.",
    )
    release: str | None = setting(
        None,
        "Directory of the release that a sealed node runs (release.json, manifest.json); it does not start if it runs anything"
        " else.",
    )
    log_checkpoint: str | None = setting(
        None,
        "File with the log's newest witnessed checkpoint, which a sealed node's evidence includes; read for each key.",
    )
    gateway_secret: str | None = setting(
        None,
        "File with the secret that a gateway must present to a sealed node; unset, it answers every sealed request.",
    )
    member_key: str | None = setting(
        None,
        "File of a sealed node's member key (`cloister log key --role node`); clients draw members only.",
    )
    node_capacity: int | None = setting(
        None, "Weight of a sealed node when clients draw; default: its replicas.", low=1, high=1_000_000
    )
    unit_members: str | None = setting(
        None,
        "Unit ports of further machines whose engines answer requests that are sealed to this node, IP:PORT, comma-separated;"
        " each is verified as clients verify a node.",
    )
    unit_port: int | None = setting(
        None,
        "Port, at `host`, for the node that names this one in its unit_members: this node verifies it, lends it its engines,"
        " and takes no requests of its own.",
        low=1,
        high=65535,
    )
    unit_policy: str | None = setting(
        None,
        "File with the hardware that machines of a unit accept of each other (JSON, as a client's policy): firmware,"
        " providers. It cannot change that they must run the same software.",
    )
    keep_responses: bool | None = setting(
        None,
        "Keep conversations of `/v1/responses` in memory for an hour; unset, the profile's default.",
    )
    files: str | None = setting(
        None, "Directory for users' files and batches (`/v1/files`, `/v1/batches`), encrypted; unset, nothing is kept."
    )
    files_key: str | None = setting(
        None, "File of their encryption key, created if it does not exist; unset, next to the directory."
    )
    files_mb: int = setting(1024, "Disk limit for files and batches, in MiB.", low=1)
    drain_timeout_s: float = setting(30.0, "Time that running requests get to finish after SIGTERM.", low=0)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of `served_model_name`; replies use the first one."""
        return _names(self.served_model_name)


ATTESTING: Final = (
    "attester",
    "attest_gpus",
    "amd_certificates",
    "intel_collateral",
    "nvidia_collateral",
    "release",
    "log_checkpoint",
    "member_key",
    "node_capacity",
    "unit_members",
    "unit_port",
    "unit_policy",
)
"""Settings of `ServerConfig` that only a sealed node uses."""


@dataclass(frozen=True, slots=True)
class SettingReason:
    """Why a setting has its value."""

    name: str
    value: object
    why: str


@dataclass(frozen=True, slots=True)
class Resolved(Generic[C]):
    """A configuration and the reason for each of its values."""

    config: C
    reasons: tuple[SettingReason, ...]

    def explain(self, **changed: tuple[object, str]) -> Resolved[C]:
        """Returns a copy in which each named setting has the given value and reason."""
        config = replace(self.config, **{name: value for name, (value, _) in changed.items()})  # type: ignore[type-var]
        reasons = tuple(SettingReason(r.name, *changed[r.name]) if r.name in changed else r for r in self.reasons)
        return Resolved(config, reasons)


def resolve(cls: type[C], layers: Iterable[tuple[str, Mapping[str, object]]]) -> Resolved[C]:
    """Merges layers of settings (later ones win) and checks every value.

    Args:
        cls: EngineConfig or ServerConfig.
        layers: (origin, settings by name), such as ("flag", {"port": 8001}). Values of None are ignored.

    Raises:
        ConfigError: values have the wrong type or range; the message states valid values.
    """
    with Refusals() as refusals:
        return resolve_readable(cls, layers, refusals)


def resolve_readable(cls: type[C], layers: Iterable[tuple[str, Mapping[str, object]]], refusals: Refusals) -> Resolved[C]:
    """Merges layers of settings as `resolve` does, without values that have the wrong type or range: those are refused."""
    hints = get_type_hints(cls)
    values: dict[str, object] = {}
    reasons = {f.name: SettingReason(f.name, f.default, "default") for f in fields(cls)}  # type: ignore[arg-type]
    metadata = {f.name: f.metadata for f in fields(cls)}  # type: ignore[arg-type]
    for source, settings in layers:
        for name, given in settings.items():
            if given is None or name not in reasons:
                continue
            try:
                value = check_value(name, given, hints[name], metadata[name])
            except ConfigError as error:
                refusals.add_unreadable(error, name)
                continue
            values[name] = value
            reasons[name] = SettingReason(name, value, source)
    return Resolved(cls(**values), tuple(reasons.values()))


def parse_adapters(setting: str) -> list[tuple[str, str]]:
    """Returns (name, directory) of each adapter that the setting `lora` names.

    Raises:
        ConfigError: an entry is not NAME=DIRECTORY, or a name occurs twice.
    """
    given = [entry.partition("=") for entry in setting.split(",") if entry.strip()]
    pairs = [(name.strip(), path.strip()) for name, _, path in given]
    if any(not name or not path for name, path in pairs) or len(dict(pairs)) < len(pairs):
        raise ConfigError("lora must be NAME=DIRECTORY, with commas between several, each name once", param="lora")
    return pairs


MAX_UNIT_MEMBERS: Final = 7
"""Most other machines of a sealed unit: the evidence of all of them has to fit into the leader's."""


def parse_unit_members(setting: str | None) -> tuple[tuple[str, int], ...]:
    """Returns (IP address, port) of each member that the setting `unit_members` names.

    Raises:
        ConfigError: an entry is no address with a port, occurs twice, or there are too many.
    """
    found = []
    for entry in _names(setting):
        host, _, port = entry.rpartition(":")
        has_brackets = host.startswith("[") and host.endswith("]")
        try:
            address = ipaddress.ip_address(host[1:-1] if has_brackets else host)
        except ValueError:
            address = None
        if (
            address is None
            or has_brackets != (address.version == 6)
            or not port.isascii()
            or not port.isdigit()
            or not 0 < int(port) < 2**16
        ):
            raise ConfigError(
                "unit_members must be IP:PORT, with commas between several, such as 10.0.0.2:9100 or [fd00::2]:9100; a sealed "
                "node looks up no names",
                param="unit_members",
            )
        found.append((str(address), int(port)))
    if len(set(found)) < len(found) or len(found) > MAX_UNIT_MEMBERS:
        raise ConfigError(f"unit_members must name each member once, at most {MAX_UNIT_MEMBERS}", param="unit_members")
    if setting is not None and not found:
        raise ConfigError("unit_members names no member; leave it out, or name IP:PORT of one", param="unit_members")
    return tuple(found)


def refuse_unknown(names: Iterable[str], known: Iterable[str], source: str, refusals: Refusals) -> None:
    """Refuses each unknown name, with the closest existing one."""
    known = tuple(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known settings: {', '.join(sorted(known))}"
            refusals.add_unreadable(ConfigError(f"unknown setting {name!r} in {source}{hint}", param=name), name, *near)


def setting_names(*classes: type[Any]) -> tuple[str, ...]:
    """Names of every setting of the classes given."""
    return tuple(f.name for cls in classes for f in fields(cls))


_KINDS: Final[Mapping[type[Any], str]] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list", dict: "a table",
}  # fmt: skip
"""The types of values, as users call them."""


def check_value(name: str, value: object, hint: Any, metadata: Mapping[str, Any]) -> object:
    """Converts `value` to the declared type of a setting.

    Raises:
        ConfigError: it cannot be converted, or is not within the choices or the range.
    """
    kind = next(a for a in _alternatives(hint) if a is not type(None))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} must be {_KINDS[kind]}, not {_KINDS.get(type(value), type(value).__name__)}", param=name)
    if metadata["choices"] and value not in metadata["choices"]:
        raise ConfigError(f"{name} must be one of: {', '.join(metadata['choices'])}", param=name)
    if isinstance(value, int | float):
        if not math.isfinite(value):
            raise ConfigError(f"{name} must be a finite number", param=name)
        low, high = metadata["low"], metadata["high"]
        if low is not None and value < low:
            raise ConfigError(f"{name} must be at least {low:g}, not {value:g}", param=name)
        if high is not None and value > high:
            raise ConfigError(f"{name} must be at most {high:g}, not {value:g}", param=name)
    return value


def _names(listed: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (listed or "").split(",") if name.strip())


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
