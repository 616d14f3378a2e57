"""Damages real evidence at random and lets the verifiers judge it: `python -m benchmarks.mutated_evidence --seconds 60`.

`--nitro FILE` adds a document of an AWS Nitro enclave, as its hypervisor gave it; none is among the vectors. It is judged at
the time that it names, for its certificate holds three hours. `--snp DIR` adds a report of SEV-SNP: the file `report`, beside
`vlek` and `asvk` or `vcek` and `ask`, and `ark`. `--every-bit` flips each bit once instead: minutes.

Exit status 1 if a verifier raises anything, or accepts evidence whose signed bytes are not those of the original. What may
differ: white space of PEM, the case of hex digits, copies of chains in Intel's collateral that nothing relies on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from cloister.trust.attestation import AttestationPolicy, Findings, Outcome
from cloister.trust.attestation.certificates import load_certificates
from cloister.trust.attestation.nitro import NitroVerifier, read_document
from cloister.trust.attestation.nvidia import GpuVerifier
from cloister.trust.attestation.rim import RIM_ROOTS, Rim, verify_rim
from cloister.trust.attestation.sev_snp import SnpVerifier
from cloister.trust.attestation.snp_report import name_chain, read_report
from cloister.trust.attestation.tdx import TdxVerifier, read_quote
from tests import attestation_vectors as real

POLICY = AttestationPolicy(profile="team")
HEX = ("root_ca_crl", "pck_crl", "tcb_info_signature", "qe_identity_signature")

Case = tuple[bytes, Callable[[bytes], Findings], Callable[[bytes], object]]
"""The original, what judges a damaged one, and what of it is signed."""
UNSIGNED = {"report-form", "report-signature", "chain-root", "chain-authority", "chain-signature", "chain-expired"}
"""Steps that fail where nobody who is trusted signed a report."""
FLAWS = {"debug"}
"""What is wrong with the vectors themselves: the guest of the SNP report allows it."""


def list_cases() -> dict[str, Case]:
    """Each kind of bytes that a node sends."""
    snp, certificates = real.snp_report(), real.snp_certificates()
    quote, collateral = real.td_quote(), real.td_collateral()
    gpu, chain, nonce = real.gpu_evidence()
    data, expected = read_report(snp).report_data, read_quote(quote).report.report_data

    def judge_snp(**changes: bytes) -> Findings:
        return SnpVerifier().verify_report(changes.pop("report", snp), certificates | changes, data, POLICY, real.NOW)

    def judge_quote(damaged: bytes) -> Findings:
        return TdxVerifier().verify_quote(damaged, collateral, expected, POLICY, real.NOW)

    def judge_collateral(damaged: bytes) -> Findings:
        return TdxVerifier().verify_quote(quote, damaged, expected, POLICY, real.NOW)

    return {
        "SNP report": (snp, lambda damaged: judge_snp(report=damaged), bytes),
        "SNP VCEK": (certificates["vcek"], lambda damaged: judge_snp(vcek=damaged), bytes),
        "SNP ASK": (certificates["ask"], lambda damaged: judge_snp(ask=damaged), to_signed_parts),
        "SNP ARK": (certificates["ark"], lambda damaged: judge_snp(ark=damaged), to_signed_parts),
        "TDX quote": (quote, judge_quote, lambda damaged: (damaged[:1256], to_signed_parts(read_quote(damaged).pck_chain))),
        "TDX collateral": (collateral, judge_collateral, to_signed),
        "GPU report": (gpu, lambda damaged: GpuVerifier().verify_report(damaged, chain, nonce, POLICY, real.NOW), bytes),
        "GPU chain": (
            chain,
            lambda damaged: GpuVerifier().verify_report(gpu, damaged, nonce, POLICY, real.NOW),
            to_signed_parts,
        ),
        "RIM": (real.vbios_rim(), lambda damaged: judge_rim(damaged)[0], lambda damaged: to_read(judge_rim(damaged)[1])),
    }


def judge_rim(damaged: bytes) -> tuple[Findings, Rim | None]:
    """Judges reference measurements of NVIDIA."""
    findings = Findings()
    return findings, verify_rim(findings, damaged, RIM_ROOTS, real.RIM_NOW)


def to_read(rim: Rim | None) -> object:
    """What is relied on of reference measurements."""
    return rim and (rim.product, rim.version, rim.measurements, [one.tbs_certificate_bytes for one in rim.chain])


def open_snp(folder: Path) -> Case:
    """A real report of SEV-SNP with its certificates; who signed it is judged, and not what it says."""
    extra = {path.name: path.read_bytes() for path in folder.iterdir()}
    original = extra.pop("report")
    leaf = load_certificates(extra[name_chain(read_report(original).signing_key)[0]])[0]
    now = leaf.not_valid_before_utc.timestamp() + 1

    def judge(damaged: bytes) -> Findings:
        judged = SnpVerifier().verify_report(damaged, extra, read_report(original).report_data, POLICY, now)
        return Findings(step for step in judged if step.slug in UNSIGNED or step.outcome is not Outcome.FAILED)

    if not judge(original).accepted:
        raise SystemExit(f"{folder} is refused as it is: {judge(original).of(Outcome.FAILED)[0].text}")
    return original, judge, bytes


def open_nitro(path: Path) -> Case:
    """A real Nitro document; who signed it is judged, and not for whom it was made."""
    original = path.read_bytes()
    now = read_document(original).timestamp_ms / 1000 + 1

    def judge(damaged: bytes) -> Findings:
        findings = Findings()
        NitroVerifier().verify_document(findings, damaged, now)
        return findings

    if not judge(original).accepted:
        raise SystemExit(f"{path} is refused as it is: {judge(original).of(Outcome.FAILED)[0].text}")
    return original, judge, bytes


def to_signed_parts(chain: bytes) -> list[tuple[bytes, bytes]]:
    """What is signed of each certificate, and the signature: not what PEM puts around them, nor how many bits DER counts."""
    return [(certificate.tbs_certificate_bytes, certificate.signature) for certificate in load_certificates(chain)]


def to_signed(collateral: bytes) -> dict[str, str]:
    """The fields of collateral that are relied on."""
    fields: dict[str, str] = json.loads(collateral)
    return {name: fields[name].lower() if name in HEX else fields[name] for name in (*HEX, "tcb_info", "qe_identity")}


def damage(original: bytes, source: random.Random) -> bytes:
    """Flips bits, sets bytes, cuts, or adds."""
    damaged = bytearray(original)
    if source.random() < 0.1:
        damaged = damaged[: source.randrange(len(damaged))]
    for _ in range(source.choice((1, 1, 1, 2, 8, 40)) if damaged else 0):
        where = source.randrange(len(damaged))
        damaged[where] = source.choice((0, 255, damaged[where] ^ (1 << source.randrange(8)), source.randrange(256)))
    if source.random() < 0.05:
        damaged += source.randbytes(source.randrange(1, 50))
    return bytes(damaged)


def flip_each_bit(original: bytes) -> Iterator[bytes]:
    """Yields the original with one bit changed, for each bit."""
    for where in range(len(original) * 8):
        damaged = bytearray(original)
        damaged[where // 8] ^= 1 << where % 8
        yield bytes(damaged)


def list_damaged(cases: dict[str, Case], source: random.Random, seconds: float) -> Iterator[tuple[str, bytes]]:
    """Yields damaged evidence of each case in turn until the time is over."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for name, (original, _, _) in cases.items():
            damaged = damage(original, source)
            if damaged != original:
                yield name, damaged


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nitro", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--snp", type=Path, action="append", default=[], metavar="DIR")
    parser.add_argument("--every-bit", action="store_true")
    parser.add_argument("--only", metavar="CASE", help="a part of the name of the cases to try")
    given = parser.parse_args()
    cases = list_cases() | {f"Nitro {path.name}": open_nitro(path) for path in given.nitro}
    cases |= {f"SNP {folder.name}": open_snp(folder) for folder in given.snp}
    cases = {name: case for name, case in cases.items() if (given.only or "") in name}
    counts: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    work: Iterator[tuple[str, bytes]]
    if given.every_bit:
        work = ((name, damaged) for name, (original, _, _) in cases.items() for damaged in flip_each_bit(original))
    else:
        work = list_damaged(cases, random.Random(given.seed), given.seconds)
    for name, damaged in work:
        original, judge, signed = cases[name]
        try:
            failed = {step.slug for step in judge(damaged).of(Outcome.FAILED)} - FLAWS
            outcome = "refused" if failed else "accepted"
            if outcome == "accepted" and signed(damaged) != signed(original):
                wrong.append(f"{name}: accepted with other signed bytes")
        except Exception as error:
            outcome = "raised"
            wrong.append(f"{name}: {type(error).__name__}")
        counts[name, outcome] += 1
    for (name, outcome), count in sorted(counts.items()):
        print(f"{name:15} {outcome:8} {count:7,}")
    for line in sorted(set(wrong)):
        print(f"WRONG {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
