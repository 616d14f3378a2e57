"""Sealed messages: binary HTTP, HPKE, oblivious HTTP in both forms, keys and their rotation, padding, replays.

Pure: bytes in, bytes out; time is an argument. A client seals with `RequestSealer` (or `seal_chunked_request`) and opens with
`ResponseOpener`; a receiver takes the context of a request from its `Receiver` and seals with `ResponseSealer`.
"""

from cloister.privacy.sealing.bhttp import BinaryHttpWriter, decode_request, decode_response, encode_request, encode_response
from cloister.privacy.sealing.bhttp_reader import MAX_HEAD_BYTES, MessageReader
from cloister.privacy.sealing.chunked import (
    DRAFT,
    MAX_CHUNK_BYTES,
    ChunkOpener,
    ChunkSealer,
    RequestSealer,
    ResponseOpener,
    ResponseSealer,
    seal_chunked_request,
)
from cloister.privacy.sealing.configuration import (
    KEYS_MEDIA_TYPE,
    KeyConfiguration,
    choose_configuration,
    encode_keys,
    parse_configuration,
    parse_keys,
)
from cloister.privacy.sealing.errors import KeyConfigurationError, MessageError, ReplayCacheFullError, UnsealError
from cloister.privacy.sealing.hpke import SUITES, Context, ContextSecrets, Suite
from cloister.privacy.sealing.kem import X25519, Kem, KemPrivateKey
from cloister.privacy.sealing.kems import KEMS
from cloister.privacy.sealing.keys import (
    GATEWAY_KEY_LIFE_S,
    GATEWAY_KEY_OVERLAP_S,
    NODE_KEY_LIFE_S,
    NODE_KEY_OVERLAP_S,
    KeyRing,
    SealingKey,
)
from cloister.privacy.sealing.messages import (
    Content,
    Fields,
    HttpRequest,
    HttpResponse,
    Part,
    RequestHead,
    ResponseHead,
    Trailers,
    find_field,
)
from cloister.privacy.sealing.ohttp import (
    CHUNKED,
    FORMS,
    WHOLE,
    Exchange,
    Form,
    Header,
    header_bytes,
    open_response,
    seal_request,
    seal_response,
)
from cloister.privacy.sealing.padding import LARGEST_BUCKET_BYTES, bucket_bytes
from cloister.privacy.sealing.receiver import Receiver
from cloister.privacy.sealing.replay import ReplayCache
from cloister.privacy.sealing.xwing import XWING

__all__ = [
    "CHUNKED",
    "DRAFT",
    "FORMS",
    "GATEWAY_KEY_LIFE_S",
    "GATEWAY_KEY_OVERLAP_S",
    "KEMS",
    "KEYS_MEDIA_TYPE",
    "LARGEST_BUCKET_BYTES",
    "MAX_CHUNK_BYTES",
    "MAX_HEAD_BYTES",
    "NODE_KEY_LIFE_S",
    "NODE_KEY_OVERLAP_S",
    "SUITES",
    "WHOLE",
    "X25519",
    "XWING",
    "BinaryHttpWriter",
    "ChunkOpener",
    "ChunkSealer",
    "Content",
    "Context",
    "ContextSecrets",
    "Exchange",
    "Fields",
    "Form",
    "Header",
    "HttpRequest",
    "HttpResponse",
    "Kem",
    "KemPrivateKey",
    "KeyConfiguration",
    "KeyConfigurationError",
    "KeyRing",
    "MessageError",
    "MessageReader",
    "Part",
    "Receiver",
    "ReplayCache",
    "ReplayCacheFullError",
    "RequestHead",
    "RequestSealer",
    "ResponseHead",
    "ResponseOpener",
    "ResponseSealer",
    "SealingKey",
    "Suite",
    "Trailers",
    "UnsealError",
    "bucket_bytes",
    "choose_configuration",
    "decode_request",
    "decode_response",
    "encode_keys",
    "encode_request",
    "encode_response",
    "find_field",
    "header_bytes",
    "open_response",
    "parse_configuration",
    "parse_keys",
    "seal_chunked_request",
    "seal_request",
    "seal_response",
]
