"""Admission: the credential fixes scope, tenant and class of a request; the client's own requests count only if the profile
permits it."""

from __future__ import annotations

import hashlib
import os
import re
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cloister.policy.credentials import Credential, Credentials, RandomBytes
from cloister.policy.policy import Policy, Use
from cloister.policy.quotas import Account
from cloister.types.errors import AuthenticationError, ConfigError, InvalidRequestError, PolicyError
from cloister.types.request import KEYLESS_TENANT
from cloister.types.scope import LOCAL_SCOPE, PERSON_LIFETIME_S, SESSION_LIFETIME_S, Scope, ScopeKind

if TYPE_CHECKING:
    from cloister.policy.oidc import People, Person

MAX_PEOPLE = 65_536
"""Number of users whose usage is counted; beyond it, the least recently used count is dropped."""
_KEYLESS_OWNER = b"local"
SESSION_HEADER = "cloister-session"
_SALT_BYTES = 32
_SECRET = re.compile("[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class Admission:
    """The rights of a request. Its repr does not identify the user.

    Attributes:
        scope: which requests may share its KV.
        tenant: whose fair share it uses (fairness is per tenant).
        priority: its class; smaller is more urgent.
        account: usage of its key; None without limits.
        is_operator: it may change what the server runs.
        owner: secret of its tenant or of this machine, under which stored objects are found; None if callers cannot be
            distinguished.
        key: digest of its key, for work that continues after the request; None without keys.
        cache_key: stands for the request's `prompt_cache_key` within its scope; empty for none, or if routers may not use it.
    """

    scope: Scope = field(repr=False)
    tenant: str = field(repr=False)
    priority: int = field(repr=False)
    account: Account | None = field(default=None, repr=False, compare=False)
    is_operator: bool = field(default=False, repr=False, compare=False)
    owner: bytes | None = field(default=None, repr=False, compare=False)
    key: bytes | None = field(default=None, repr=False, compare=False)
    cache_key: bytes = field(default=b"", repr=False, compare=False)


class Gate:
    """Admits requests under the active profile.

    Args:
        policy: the active profile.
        credentials: API keys; None if the server requires none.
        people: users of an OpenID issuer, whose tokens are accepted in addition to API keys; None without an issuer.
        loopback: only this machine can connect.
        reuses_prefixes: the prefix cache is on, which sessions need.
        sealed: every request comes through a sealed node, which sends answers in the profile's traffic shape (`trust.shape`).
        random: source of salts for scopes that live as long as one request.

    Raises:
        ConfigError: keys are required, and there are none.
    """

    def __init__(
        self,
        policy: Policy,
        credentials: Credentials | None,
        *,
        loopback: bool,
        people: People | None = None,
        reuses_prefixes: bool = True,
        sealed: bool = False,
        random: RandomBytes = os.urandom,
    ) -> None:
        if credentials is not None and not credentials.keys:
            raise ConfigError("the API key file has no keys; make one with: cloister keys add NAME", param="api_keys")
        self.policy = policy
        self._credentials = credentials
        self.people = people
        self._accounts: dict[bytes, Account] = {}
        self._person_accounts: OrderedDict[bytes, Account] = OrderedDict()
        self._random = random
        self._loopback = loopback
        self._reuses_prefixes = reuses_prefixes
        self._streaming = "sealed-streaming" if sealed else "streaming"
        self._keyless_scope = _keyless_scope(loopback, policy.widest_scope)

    @property
    def asks_for_keys(self) -> bool:
        """Whether every request needs an API key or a token."""
        return self._credentials is not None or self.people is not None

    @property
    def widest_scope(self) -> ScopeKind:
        """The widest possible scope of a request here: which requests may ever hit its prefix."""
        if not self.asks_for_keys:
            return ScopeKind.REQUEST if self._keyless_scope is None else ScopeKind.LOCAL
        return min(self.policy.widest_scope, ScopeKind.TENANT, key=list(ScopeKind).index)

    @property
    def tells_owners(self) -> bool:
        """Whether the server can tell that two requests come from the same caller."""
        return self._credentials is not None or (self.people is None and self._keyless_scope is not None)

    @property
    def may_stream(self) -> bool:
        """Whether answers may be streamed here."""
        return self.policy.allows(self._streaming)

    def admit(self, api_key: str | None) -> Admission:
        """Admits the holder of an API key. On a server without keys it admits everyone and ignores a key that a client sends.

        Raises:
            AuthenticationError: keys are required, and this one is unknown.
        """
        if self._credentials is None and self.people is not None:
            raise AuthenticationError("this server asks for a token of its issuer: send it as 'Authorization: Bearer TOKEN'")
        if self._credentials is None:
            owner = _KEYLESS_OWNER if self.tells_owners else None
            scope = self._keyless_scope or self._fresh_scope()
            return Admission(scope, KEYLESS_TENANT, 0, is_operator=self._loopback, owner=owner)
        return self._admit_key(self._credentials, _authenticate(self._credentials, api_key))

    def admit_person(self, person: Person) -> Admission:
        """Admits the holder of a verified token. Nothing is stored for users: their secrets are lost when this process ends."""
        account = None
        if person.limits.any:
            account = self._person_accounts.setdefault(person.account, Account(person.limits))
            self._person_accounts.move_to_end(person.account)
            if len(self._person_accounts) > MAX_PEOPLE:
                self._person_accounts.popitem(last=False)
        return self._admit(
            person.salt, person.tenant, person.priority, account, person.is_operator, lifetime_s=PERSON_LIFETIME_S
        )

    def readmit(self, key: bytes | None) -> Admission | None:
        """Admits background work, one class below that of the key; None if the key was removed.

        Args:
            key: the value of `Admission.key`.
        """
        admission = None
        if self._credentials is None and self.people is None and key is None:
            admission = self.admit(None)
        elif self._credentials is not None and key is not None:
            found = next((each for each in self._credentials.keys if each.digest == key), None)
            admission = self._admit_key(self._credentials, found) if found is not None else None
        return None if admission is None else replace(admission, priority=admission.priority + 1)

    def _admit_key(self, credentials: Credentials, credential: Credential) -> Admission:
        salt = credentials.tenants[credential.tenant]
        account = self._account_of(credential)
        admission = self._admit(salt, credential.tenant, credential.priority, account, credential.is_operator)
        return replace(admission, owner=salt, key=credential.digest)

    def _admit(
        self,
        salt: bytes,
        tenant: str,
        priority: int,
        account: Account | None,
        is_operator: bool,
        lifetime_s: float | None = None,
    ) -> Admission:
        is_alone = self.policy.widest_scope is ScopeKind.REQUEST
        scope = self._fresh_scope() if is_alone else Scope(ScopeKind.TENANT, salt, lifetime_s)
        # An anonymous user cannot be targeted: a strict profile shows the engine the public class in place of the tenant.
        shown = tenant if self.policy.names_tenants else f"class {priority}"
        return Admission(scope, shown, priority, account, is_operator)

    def with_session(self, admission: Admission, session: str | None) -> Admission:
        """Returns the admission with the scope of a session: requests with the same secret share KV.

        It is nested in the scope of the tenant or of this machine. If every request would have its own scope, the secret alone
        determines what is shared.

        Args:
            session: 256 random bits as 64 hexadecimal digits, from the request's header `cloister-session`, or None.

        Raises:
            PolicyError: the profile has no sessions.
            InvalidRequestError: the value is not such a secret, or the prefix cache is off.
        """
        if session is None:
            return admission
        self.policy.check({"session": Use(True, "the request")})
        if not self._reuses_prefixes:
            raise InvalidRequestError(f"this server reuses no prefixes; leave the header `{SESSION_HEADER}` out")
        if not _SECRET.fullmatch(session):
            raise InvalidRequestError(f"the header `{SESSION_HEADER}` is 256 random bits, as 64 hexadecimal digits")
        outer = admission.scope
        circle = b"" if outer.kind is ScopeKind.REQUEST else outer.seed
        salt = hashlib.sha256(b"cloister/session/1\0" + circle + b"\0" + bytes.fromhex(session)).digest()
        return replace(admission, scope=Scope(ScopeKind.SESSION, salt, SESSION_LIFETIME_S, circle))

    def change_keys(self, credentials: Credentials) -> None:
        """Replaces the API keys. Admitted requests continue; the usage of remaining keys is kept.

        Unlike at start, an empty set is valid: after the last key is removed, nobody is admitted.
        """
        self._credentials = credentials
        known = {key.digest: key.limits for key in credentials.keys}
        self._accounts = {digest: account for digest, account in self._accounts.items() if digest in known}
        for digest, account in self._accounts.items():
            account.limits = known[digest]

    def with_request_options(
        self,
        admission: Admission,
        *,
        stream: bool = False,
        priority: int | None = None,
        cache_salt: str | None = None,
        prompt_cache_key: str | None = None,
        documents: bool = False,
    ) -> Admission:
        """Returns the admission with the request's own `stream`, `priority`, `cache_salt` and `prompt_cache_key` applied.

        Args:
            stream: the request's field `stream`.
            priority: the request's field `priority`, None when it has none.
            cache_salt: the request's field `cache_salt`, which narrows its scope; None when it has none.
            prompt_cache_key: the request's field of this name, which counts inside of its scope only. It has no effect where
                replicas are drawn.
            documents: whether the request has the field `documents`.

        Raises:
            PolicyError: the profile refuses one of them; the message names the rule.
        """
        self.policy.check(
            {
                self._streaming: Use(stream, "the request"),
                "client-priority": Use(priority is not None, "the request"),
                "documents": Use(documents, "the request"),
            }
        )
        if cache_salt is not None:
            admission = replace(admission, scope=admission.scope.narrow(cache_salt))
        if prompt_cache_key and self.policy.allows("load-routing"):
            admission = replace(admission, cache_key=admission.scope.blind(prompt_cache_key))
        return admission if priority is None else replace(admission, priority=priority)

    def check_operator(self, admission: Admission) -> None:
        """Raises PolicyError if the caller may not change what the server runs.

        An operator holds an operator's key; on a server without keys, every local client is one.
        """
        if not admission.is_operator:
            raise PolicyError(
                "only an operator may do this: with a key made by `cloister keys add NAME --operator`, or, on a server without "
                "keys that listens on loopback only, from this machine"
            )

    def notice(self) -> str | None:
        """Returns a warning to show at start if users cannot be distinguished, else None."""
        if self.asks_for_keys or self._keyless_scope is not None:
            return None
        gain = "share inside a tenant" if self.policy.allows("prefix-cache") else "tell tenants apart"
        return (
            f"{self.policy.ruling('keyless-bind').rule}: without API keys every request gets a scope of its own, so no "
            f"request reuses another one's prefix. To {gain}: `cloister keys add NAME`, then --api-keys FILE."
        )

    def _account_of(self, credential: Credential) -> Account | None:
        if not credential.limits.any:
            return None
        return self._accounts.setdefault(credential.digest, Account(credential.limits))

    def _fresh_scope(self) -> Scope:
        return Scope(ScopeKind.REQUEST, self._random(_SALT_BYTES))


def _keyless_scope(loopback: bool, widest: ScopeKind) -> Scope | None:
    """The common scope of all requests without keys; None if each gets its own."""
    return LOCAL_SCOPE if loopback and widest is ScopeKind.LOCAL else None


def _authenticate(credentials: Credentials, api_key: str | None) -> Credential:
    if not api_key:
        raise AuthenticationError("this server asks for an API key: send it as 'Authorization: Bearer KEY'")
    credential = credentials.find(api_key)
    if credential is None:
        raise AuthenticationError("this API key is not known here: check it, or ask the operator of the server for one")
    return credential
