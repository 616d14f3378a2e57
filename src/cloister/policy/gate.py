"""Admission: the credential fixes scope, tenant and class of a request; what a client says counts where the profile lets it."""

from __future__ import annotations

import hashlib
import os
import re
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from cloister.policy.credentials import Credential, Credentials, RandomBytes
from cloister.policy.oidc import People, Person
from cloister.policy.policy import Policy, Use
from cloister.policy.quotas import Account
from cloister.types.errors import AuthenticationError, ConfigError, InvalidRequestError, PolicyError
from cloister.types.scope import LOCAL_SCOPE, SESSION_LIFETIME_S, Scope, ScopeKind

KEYLESS_TENANT = "local"
MAX_PEOPLE = 65_536
"""People whose use is counted; beyond it, that of whoever came longest ago begins anew."""
_KEYLESS_OWNER = b"local"
SESSION_HEADER = "cloister-session"
_SALT_BYTES = 32
_SECRET = re.compile("[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class Admission:
    """What a request may do. Its text says nothing of who asks.

    Attributes:
        scope: who may share its KV.
        tenant: whose fair share it uses.
        priority: its class; smaller is more urgent.
        account: what its key has used; None without limits.
        is_operator: it may change what the server runs.
        owner: secret of its tenant, or of this machine: what is kept is found by it; None where nobody can be told apart.
        key: digest of its key, for work that goes on after the request; None without keys.
    """

    scope: Scope = field(repr=False)
    tenant: str = field(repr=False)
    priority: int = field(repr=False)
    account: Account | None = field(default=None, repr=False, compare=False)
    is_operator: bool = field(default=False, repr=False, compare=False)
    owner: bytes | None = field(default=None, repr=False, compare=False)
    key: bytes | None = field(default=None, repr=False, compare=False)


class Gate:
    """Lets requests in, under the active profile.

    Args:
        policy: the active profile.
        credentials: API keys; None when none are asked for.
        people: of an OpenID issuer, whose tokens are taken beside API keys; None where there is no issuer.
        loopback: only this machine can connect.
        reuses_prefixes: the prefix cache is on, so that a session means something.
        sealed: every request comes through a sealed node, which gives answers the profile's shape (`trust.shape`).
        random: source of salts for scopes that live as long as one request.

    Raises:
        ConfigError: keys are asked for, and there are none.
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
        """Whether nobody is let in without an API key, or a token."""
        return self._credentials is not None or self.people is not None

    @property
    def widest_scope(self) -> ScopeKind:
        """How wide the scope of a request can be here: who may ever find its prefix."""
        if not self.asks_for_keys:
            return ScopeKind.REQUEST if self._keyless_scope is None else ScopeKind.LOCAL
        return min(self.policy.widest_scope, ScopeKind.TENANT, key=list(ScopeKind).index)

    @property
    def tells_owners(self) -> bool:
        """Whether it is known of two requests that they come from the same side."""
        return self._credentials is not None or (self.people is None and self._keyless_scope is not None)

    @property
    def may_stream(self) -> bool:
        """Whether answers may be streamed here."""
        return self.policy.allows(self._streaming)

    def admit(self, api_key: str | None) -> Admission:
        """Admits the holder of an API key; without keys, anyone (a key that a client sends all the same is not looked at).

        Raises:
            AuthenticationError: keys are asked for, and this is none of them.
        """
        if self._credentials is None and self.people is not None:
            raise AuthenticationError("this server asks for a token of its issuer: send it as 'Authorization: Bearer TOKEN'")
        if self._credentials is None:
            owner = _KEYLESS_OWNER if self.tells_owners else None
            scope = self._keyless_scope or self._fresh_scope()
            return Admission(scope, KEYLESS_TENANT, 0, is_operator=self._loopback, owner=owner)
        return self._admit_key(self._credentials, _authenticate(self._credentials, api_key))

    def admit_person(self, person: Person) -> Admission:
        """Admits the holder of a verified token. Nothing is kept for people: their secrets end with this process."""
        account = None
        if person.limits.any:
            account = self._person_accounts.setdefault(person.account, Account(person.limits))
            self._person_accounts.move_to_end(person.account)
            if len(self._person_accounts) > MAX_PEOPLE:
                self._person_accounts.popitem(last=False)
        return self._admit(person.salt, person.tenant, person.priority, account, person.is_operator)

    def readmit(self, key: bytes | None) -> Admission | None:
        """Admits work that goes on after its request, in the class behind that of the key; None where the key is gone.

        Args:
            key: as `Admission.key` had it.
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

    def _admit(self, salt: bytes, tenant: str, priority: int, account: Account | None, is_operator: bool) -> Admission:
        is_alone = self.policy.widest_scope is ScopeKind.REQUEST
        scope = self._fresh_scope() if is_alone else Scope(ScopeKind.TENANT, salt)
        # Who is not told apart cannot be targeted: a strict profile shows the engine the public class in place of the tenant.
        shown = tenant if self.policy.names_tenants else f"class {priority}"
        return Admission(scope, shown, priority, account, is_operator)

    def with_session(self, admission: Admission, session: str | None) -> Admission:
        """Returns the admission with the scope of a session: those of its requests that bring the same secret share KV.

        It stays inside the scope of a tenant or of this machine; where every request would have a scope of its own, the
        secret alone says who shares.

        Args:
            session: 256 random bits as 64 hexadecimal digits, from the request's header `cloister-session`, or None.

        Raises:
            PolicyError: the profile has no sessions.
            InvalidRequestError: it is no such secret, or nothing is reused here.
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
        """Asks for other keys from now on. What was admitted goes on; what a key that stays has used still counts.

        Unlike at start, no key at all is no mistake: whoever removes the last one wants nobody in.
        """
        self._credentials = credentials
        known = {key.digest: key.limits for key in credentials.keys}
        self._accounts = {digest: account for digest, account in self._accounts.items() if digest in known}
        for digest, account in self._accounts.items():
            account.limits = known[digest]

    def with_request_options(self, admission: Admission, *, stream: bool = False, priority: int | None = None) -> Admission:
        """Returns the admission with the wishes of the request itself.

        Args:
            stream: the request's field `stream`.
            priority: the request's field `priority`, None when it has none.

        Raises:
            PolicyError: the profile refuses one of them; the message names the rule.
        """
        self.policy.check(
            {
                self._streaming: Use(stream, "the request"),
                "client-priority": Use(priority is not None, "the request"),
            }
        )
        return admission if priority is None else replace(admission, priority=priority)

    def check_operator(self, admission: Admission) -> None:
        """Raises PolicyError for who may not change what the server runs.

        An operator has an operator's key; without keys, whoever is on this machine.
        """
        if not admission.is_operator:
            raise PolicyError(
                "only an operator may do this: with a key made by `cloister keys add NAME --operator`, or, on a server without "
                "keys, from this machine alone"
            )

    def notice(self) -> str | None:
        """Returns the line to show at start where users cannot be told apart, else None."""
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
    """The one scope of all requests without keys, or None when each gets its own."""
    return LOCAL_SCOPE if loopback and widest is ScopeKind.LOCAL else None


def _authenticate(credentials: Credentials, api_key: str | None) -> Credential:
    if not api_key:
        raise AuthenticationError("this server asks for an API key: send it as 'Authorization: Bearer KEY'")
    credential = credentials.find(api_key)
    if credential is None:
        raise AuthenticationError("this API key is not known here: check it, or ask the operator of the server for one")
    return credential
