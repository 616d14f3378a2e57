"""Tokens of an OpenID issuer: a real one over loopback, and every way in which a token can be wrong."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey

from cloister.launch import resolve_settings
from cloister.launch.app import build_gate
from cloister.policy import Credentials, Gate, Policy
from cloister.policy.oidc import OidcConfig, People, Person, TokenLimits, read_oidc
from cloister.server import oidc
from cloister.server.oidc import KEEP_S, REFRESH_S, RETRY_S, IssuerError, TokenVerifier
from cloister.types.config import ServerConfig
from cloister.types.errors import AuthenticationError, ConfigError, PolicyError
from cloister.types.scope import PERSON_LIFETIME_S, ScopeKind
from tests.server.issuer import AUDIENCE, RSA, Issuer, issuing
from tests.server.running_server import MODEL, ScriptedEngine, says, serving, serving_script, start_speaking
from tests.server.test_bad_input import check_error

EC = ECKey.generate_key("P-256", {"kid": "curve"})
ED = OKPKey.generate_key("Ed25519", {"kid": "edwards"})
CHAT = {"realm_access": {"roles": ["chat"]}}
BODY = {"model": MODEL, "prompt": "x", "max_tokens": 1}


@cache
def other() -> RSAKey:
    """An attacker's key under the name of the issuer's."""
    return RSAKey.generate_key(2048, {"kid": "first"})


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with issuing() as issuer:
        yield issuer


class Clock:
    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


def people_of(issuer: Issuer, **settings: object) -> People:
    return People(OidcConfig(issuer=issuer.url, audience=AUDIENCE, **settings))


def gate_of(issuer: Issuer, credentials: Credentials | None = None, **settings: object) -> Gate:
    return Gate(Policy("team"), credentials, people=people_of(issuer, **settings), loopback=True)


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def part(value: object) -> str:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


@pytest.fixture(scope="module")
def api_key_and_client(model_path: Path, issuer: Issuer) -> Iterator[tuple[str, httpx.Client]]:
    credentials, key = Credentials.empty().add("ann")
    gate = gate_of(issuer, credentials, roles_claim="realm_access.roles", required_role="chat", operator_role="boss")
    with (
        serving(model_path, lambda: start_speaking(model_path), gate=gate) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        yield key, client


@pytest.fixture(scope="module")
def client(api_key_and_client: tuple[str, httpx.Client]) -> httpx.Client:
    return api_key_and_client[1]


def ask(client: httpx.Client, token: str) -> httpx.Response:
    return client.post("/v1/completions", json=BODY, headers=bearer(token))


def test_a_token_of_the_issuer_and_an_api_key_are_both_accepted(api_key_and_client, issuer):
    api_key, client = api_key_and_client
    assert ask(client, issuer.token(**CHAT)).status_code == 200
    assert ask(client, api_key).status_code == 200
    assert client.post("/v1/completions", json=BODY, headers={"x-api-key": issuer.token(**CHAT)}).status_code == 200
    assert client.post("/v1/completions", json=BODY).status_code == 401


@pytest.mark.parametrize(
    "claims",
    [
        {"exp": 1},
        {"exp": None},
        {"exp": "tomorrow"},
        {"exp": True},
        {"exp": 10**400},
        {"nbf": time.time() + 86_400},  # of the time of collection, which may be a quarter of an hour ago
        {"iat": time.time() + 86_400},
        {"iss": "https://other.example"},
        {"iss": None},
        {"aud": "another-service"},
        {"aud": ["a", "b"]},
        {"aud": None},
        {"aud": {AUDIENCE: 1}},
        {"sub": None},
        {"sub": ""},
        {"sub": 7},
    ],
)
def test_a_token_that_is_not_for_this_server_now_is_refused(client, issuer, claims):
    reply = ask(client, issuer.token(**{**CHAT, **claims}))
    assert check_error(reply, 401)["code"] == "invalid_token"
    assert reply.headers["www-authenticate"] == 'Bearer error="invalid_token"'
    assert "example" not in reply.text


@pytest.mark.parametrize(
    ("claims", "status"),
    [
        ({"exp": -20}, 200),  # clocks may be a minute apart
        ({"exp": -90}, 401),
        ({"nbf": 30, "iat": 30}, 200),
        ({"nbf": 90}, 401),
        ({"aud": ["a", AUDIENCE]}, 200),
        ({"realm_access": {"roles": "chat other"}}, 200),
        ({"realm_access": {"roles": ["other"]}}, 403),
        ({"realm_access": {}}, 403),
        ({"realm_access": ["chat"]}, 403),
        ({"roles": ["chat"], "realm_access": None}, 403),
    ],
)
def test_clocks_audiences_and_roles(client, issuer, claims, status):
    claims = {name: int(time.time()) + value if isinstance(value, int) else value for name, value in claims.items()}
    assert ask(client, issuer.token(**{**CHAT, **claims})).status_code == status


def forged(issuer: Issuer) -> dict[str, str]:
    """Returns tokens that no key of the issuer signed, or that are no access tokens, by what is wrong with them."""
    good = issuer.token(**CHAT)
    head, body, signature = good.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    public = hmac.digest(RSA.as_pem(private=False), f"{part({'alg': 'HS256', 'kid': 'first'})}.{body}".encode(), "sha256")
    crit = f"{part({'alg': 'RS256', 'kid': 'first', 'crit': ['bound'], 'bound': 1})}.{body}"
    critical = RSA.private_key.sign(crit.encode(), padding.PKCS1v15(), hashes.SHA256())
    return {
        "another key under the same id": issuer.token(other(), **CHAT),
        "an unknown key": issuer.token(other(), header={"kid": "unheard"}, **CHAT),
        "its key in its own header": issuer.token(other(), header={"jwk": other().as_dict(private=False)}, **CHAT),
        "its address of keys in its header": issuer.token(other(), header={"jku": f"{issuer.url}/mine"}, **CHAT),
        "no signature": f"{part({'alg': 'none', 'typ': 'at+jwt'})}.{body}.",
        "none with a key": f"{part({'alg': 'none', 'kid': 'first'})}.{body}.{signature}",
        "the public key as a secret": f"{part({'alg': 'HS256', 'kid': 'first'})}.{body}.{part(public)}",
        "another body": f"{head}.{part({**claims, 'sub': 'boss'})}.{signature}",
        "another header": f"{part({'alg': 'RS512', 'kid': 'first'})}.{body}.{signature}",
        "half a signature": good[:-170],
        "a header that has to be understood": f"{crit}.{part(critical)}",
        "no JSON": f"{part(b'{')}.{part(b'{')}.{signature}",
        "a list": f"{part([])}.{body}.{signature}",
        "nothing": "..",
        "no base64": "§.§.§",
        "a long one": issuer.token(pad="x" * 20_000, **CHAT),
        "a token of another kind": issuer.token(header={"typ": "logout+jwt"}, **CHAT),
    }


def test_what_the_issuer_did_not_sign_is_refused_with_nothing_of_it(client, issuer):
    for name, token in forged(issuer).items():
        reply = client.post("/v1/completions", json=BODY, headers={b"authorization": b"Bearer " + token.encode("latin-1")})
        assert reply.status_code == 401, name
        check_error(reply, 401)
        assert "unheard" not in reply.text
    assert "/mine" not in issuer.asked


def test_a_header_that_is_nested_deep_is_refused_and_no_fault_of_the_server(client, caplog):
    reply = ask(client, ".".join([part(b"[" * 3000), part({}), part(b"x")]))
    assert reply.status_code == 401
    assert "RecursionError" not in caplog.text


def test_a_role_lets_an_operator_do_what_others_may_not(client, issuer):
    def load(*roles: str) -> str:
        token = issuer.token(realm_access={"roles": [*roles]})
        body = {"lora_name": "a", "lora_path": "/nowhere"}
        return client.post("/v1/load_lora_adapter", json=body, headers=bearer(token)).json()["error"]["message"]

    assert "only an operator may do this" in load("chat")
    assert "only an operator" not in load("chat", "boss")


def test_tokens_of_a_day_are_counted_by_person(model_path, issuer):
    gate = gate_of(issuer, limits=TokenLimits(tokens_per_day=10))
    body = {"model": MODEL, "prompt": "four", "max_tokens": 4}
    with (
        serving(model_path, lambda: start_speaking(model_path), gate=gate) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        ann, again, ben = issuer.token(sub="ann"), issuer.token(sub="ann", jti="2"), issuer.token(sub="ben")
        first = client.post("/v1/completions", json=body, headers=bearer(ann))
        assert (first.status_code, first.headers["x-ratelimit-limit-tokens"]) == (200, "10")
        refused = client.post("/v1/completions", json=body, headers=bearer(again))
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert client.post("/v1/completions", json=body, headers=bearer(ben)).status_code == 200


def test_no_log_and_no_figure_names_who_asks(client, issuer, caplog):
    with caplog.at_level(logging.DEBUG):
        for claims in (CHAT, {**CHAT, "exp": 1}, {"sub": "ann@example.org"}):
            ask(client, issuer.token(**claims))
        operator = {**CHAT, "realm_access": {"roles": ["chat", "boss"]}}
        figures = client.get("/metrics", headers=bearer(issuer.token(**operator))).text
        assert "cloister_http_replies_total" in figures
    for text in (caplog.text, figures):
        assert "ann@" not in text
        assert "eyJ" not in text


def test_a_person_is_a_pseudonym_that_no_two_starts_share(issuer):
    claims = {"iss": issuer.url, "aud": AUDIENCE, "sub": "ann", "org": "blue", "exp": 2000}

    def admit(people: People, **more: str) -> Person:
        return people.admit({}, {**claims, **more}, 1000)

    first, second = people_of(issuer), people_of(issuer)
    ann, again, ben = admit(first), admit(first), admit(first, sub="ben")
    assert ann == again
    assert len({person.account for person in (ann, ben, admit(second))}) == 3
    assert len({person.tenant for person in (ann, ben, admit(second))}) == 3
    assert len({ann.account.hex(), ann.tenant, ann.salt.hex()}) == 3
    assert "ann" not in repr(ann) + ann.tenant
    by_org = people_of(issuer, tenant_claim="org")
    ann, ben = admit(by_org), admit(by_org, sub="ben")
    assert (ann.tenant, ann.salt) == (ben.tenant, ben.salt)
    assert ann.account != ben.account


def test_people_have_scopes_of_their_own(issuer):
    gate = gate_of(issuer)
    claims = {"iss": issuer.url, "aud": AUDIENCE, "exp": 2000}
    ann, ben = (gate.admit_person(gate.people.admit({}, {**claims, "sub": sub}, 1000)) for sub in ("ann", "ben"))
    assert ann.scope.kind is ScopeKind.TENANT
    assert ann.scope != ben.scope
    assert ann.scope.lifetime_s == ben.scope.lifetime_s == PERSON_LIFETIME_S  # their shares of the cache become free again
    assert not ann.is_operator
    with pytest.raises(AuthenticationError, match="token of its issuer"):
        gate.admit(None)


def verify(issuer: Issuer, work: Callable[[TokenVerifier], Awaitable[None]], clock: Clock | None = None) -> None:
    asyncio.run(work(TokenVerifier(people_of(issuer), monotonic=clock or Clock())))


@pytest.mark.parametrize(("key", "alg"), [(EC, "ES256"), (ED, "Ed25519"), (RSA, "PS256")])
def test_signatures_of_several_kinds_are_taken(key, alg):
    async def work(verifier: TokenVerifier) -> None:
        await verifier.admit(issuer.token(key, alg=alg))

    with issuing() as issuer:
        issuer.keys = [EC, ED, RSA]
        verify(issuer, work)


def test_a_new_key_is_found_and_an_old_one_dies():
    clock = Clock()

    async def work(verifier: TokenVerifier) -> None:
        await verifier.admit(issuer.token())
        issuer.keys = [EC]
        clock.s += RETRY_S
        await verifier.admit(issuer.token(EC, alg="ES256"))
        with pytest.raises(AuthenticationError):
            await verifier.admit(issuer.token())
        assert issuer.asked.count("/keys") == 2

    with issuing() as issuer:
        verify(issuer, work, clock)


def test_a_key_that_was_taken_back_is_refused_when_keys_are_read_again():
    clock = Clock()

    async def work(verifier: TokenVerifier) -> None:
        token = issuer.token()
        await verifier.admit(token)
        issuer.keys = [EC]
        await verifier.admit(token)
        clock.s += REFRESH_S
        with pytest.raises(AuthenticationError):
            await verifier.admit(token)

    with issuing() as issuer:
        verify(issuer, work, clock)


def test_tokens_with_made_up_keys_do_not_flood_the_issuer():
    async def work(verifier: TokenVerifier) -> None:
        for i in range(50):
            with pytest.raises(AuthenticationError):
                await verifier.admit(issuer.token(other(), header={"kid": f"made up {i}"}))
        assert issuer.asked.count("/keys") == 1

    with issuing() as issuer:
        verify(issuer, work)


def test_many_first_requests_wait_for_one_reading_of_the_keys():
    async def work(verifier: TokenVerifier) -> None:
        await asyncio.gather(*(verifier.admit(issuer.token()) for _ in range(20)))
        assert issuer.asked.count("/keys") == 1

    with issuing() as issuer:
        issuer.delay_s = 0.05
        verify(issuer, work)


def test_an_issuer_that_is_down_stops_nobody_whose_key_is_known_until_its_keys_are_too_old():
    clock = Clock()

    async def work(verifier: TokenVerifier) -> None:
        issuer.status = 500
        with pytest.raises(IssuerError):
            await verifier.admit(issuer.token())
        issuer.status = 200
        clock.s += RETRY_S
        await verifier.admit(issuer.token())
        issuer.status = 500
        clock.s += REFRESH_S
        await verifier.admit(issuer.token())
        clock.s += KEEP_S
        with pytest.raises(IssuerError, match="try again"):
            await verifier.admit(issuer.token())

    with issuing() as issuer:
        verify(issuer, work, clock)


def test_an_issuer_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(oidc, "FETCH_TIMEOUT_S", 0.1)

    async def work(verifier: TokenVerifier) -> None:
        began_s = time.perf_counter()
        with pytest.raises(IssuerError):
            await verifier.admit(issuer.token())
        assert time.perf_counter() - began_s < 60

    with issuing() as issuer:
        issuer.delay_s = 10.0
        verify(issuer, work)


@pytest.mark.parametrize(
    "described",
    [
        {"issuer": "https://other.example"},
        {"jwks_uri": "http://keys.example/keys"},
        {"jwks_uri": "file:///etc/passwd"},
        {"jwks_uri": None},
        {"padding": "x" * 300_000},
    ],
    ids=["another issuer", "keys without TLS", "keys in a file", "no keys", "without an end"],
)
def test_a_description_that_is_not_the_issuers_is_not_believed(described):
    async def work(verifier: TokenVerifier) -> None:
        with pytest.raises(IssuerError):
            await verifier.admit(issuer.token())

    with issuing() as issuer:
        issuer.described = described
        verify(issuer, work)


def test_a_secret_among_the_keys_counts_for_nothing():
    secret = OctKey.generate_key(256, {"kid": "first"})

    async def work(verifier: TokenVerifier) -> None:
        with pytest.raises(IssuerError):
            await verifier.admit(issuer.token(secret, alg="HS256"))

    with issuing() as issuer:
        issuer.keys = [secret]
        verify(issuer, work)


def test_a_short_key_counts_for_nothing():
    numbers = RSA.as_dict(private=False)
    short = {**numbers, "n": numbers["n"][:170]}
    with pytest.raises(ValueError, match="no key"):
        oidc._import_keys({"keys": [short]})
    assert oidc._import_keys({"keys": [short, numbers, {"kty": "AKP"}, 5]}).keys[0].kid == "first"


FILE = """issuer = "https://login.example.org/realms/main"
audience = "cloister"
operator_role = "boss"
[limits]
tokens_per_day = 1000
"""


def test_the_file_says_who_and_how_much(tmp_path):
    path = tmp_path / "oidc.toml"
    path.write_text(FILE)
    config = read_oidc(path)
    assert (config.operator_role, config.limits.tokens_per_day, config.clock_skew_s) == ("boss", 1000, 60)
    settings = resolve_settings({"oidc": str(path)})
    assert settings.engine.config.profile == "team"
    assert build_gate(settings).people.config == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("https:", "http:"), "https"),
        (("https:", "file:"), "https"),
        (("https://", "https://user:pw@"), "https"),
        (("audience", "audiance"), "audi"),
        (('"cloister"', '""'), "audience"),
        (("tokens_per_day = 1000", "tokens_per_day = 0"), "tokens_per_day"),
        (("tokens_per_day", "tokens_a_day"), "tokens_a_day"),
        (("[limits]", "[limits"), "cannot be used"),
        (("[limits]", 'roles_claim = "a..b"\n[limits]'), "claim"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path, change, words):
    path = tmp_path / "oidc.toml"
    path.write_text(FILE.replace(*change))
    with pytest.raises(ConfigError) as refused:
        read_oidc(path)
    assert words in refused.value.message


@pytest.mark.parametrize("profile", ["private", "paranoid"])
def test_a_profile_that_tells_nobody_apart_takes_no_tokens_of_people(tmp_path, profile):
    path = tmp_path / "oidc.toml"
    path.write_text(FILE)
    with pytest.raises(PolicyError, match="identity-tokens"):
        resolve_settings({"oidc": str(path), "profile": profile})
    with pytest.raises(ConfigError, match="sealed"):
        resolve_settings({"oidc": str(path), "profile": "team", "sealed": True})


def test_a_local_server_with_an_issuer_lets_nobody_in_without_a_token(model_path, issuer):
    config = ServerConfig(port=0, drain_timeout_s=1.0)
    with serving_script(model_path, ScriptedEngine(says("ok")), gate=gate_of(issuer), config=config) as server:
        url = f"{server.url}/v1/completions"
        assert httpx.post(url, json=BODY).status_code == 401
        assert httpx.post(url, json=BODY, headers={**bearer(issuer.token()), "host": "model.lan"}).status_code == 200
