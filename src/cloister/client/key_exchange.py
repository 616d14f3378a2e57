"""With which key encapsulation mechanism a client would seal, and whether its policy takes that. No I/O."""

from __future__ import annotations

from typing import Final

from cloister.client.errors import EpochRefusedError
from cloister.privacy.attestation import AttestationPolicy, Findings, Outcome
from cloister.privacy.sealing import KEMS, KeyConfigurationError, choose_configuration, parse_keys
from cloister.privacy.transparency.epoch import Epoch

STEP: Final = "key-exchange"
_REMEDY: Final = "install the wheel of `cryptography`, which brings one that does"


def judge_keys(findings: Findings, whose: str, keys: bytes, policy: AttestationPolicy) -> None:
    """Adds what requests to the holder of `keys` are sealed with.

    An X25519 key alone is no step of its own where nobody asks for more: it is what every older program has.

    Args:
        whose: "the node" or "the gateway".
        keys: `application/ohttp-keys`.
    """
    try:
        kem = choose_configuration(parse_keys(keys)).kem
    except KeyConfigurationError as error:
        findings.fail(STEP, f"{whose} offers no key that can be sealed to: {error.message}")
        return
    if kem.is_post_quantum:
        findings.prove(STEP, f"requests to {whose} are sealed with {kem.name}: a quantum computer does not open recorded ones")
    elif policy.post_quantum and not any(one.is_post_quantum for one in KEMS):
        findings.fail(STEP, "the policy asks for post-quantum encryption, and this machine's OpenSSL has no ML-KEM; " + _REMEDY)
    elif policy.post_quantum:
        findings.fail(STEP, f"{whose} offers {kem.name} only, and the policy asks for post-quantum encryption; update {whose}")


def check_gateway(epoch: Epoch, policy: AttestationPolicy) -> None:
    """Refuses an epoch whose gateway has no key that the policy takes.

    Raises:
        EpochRefusedError: nothing was sent.
    """
    findings = Findings()
    judge_keys(findings, "the gateway", epoch.gateway.keys, policy)
    for failed in findings.of(Outcome.FAILED):
        raise EpochRefusedError(f"Nothing was sent: {failed.text}.", failed.slug)
