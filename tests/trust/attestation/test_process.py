"""The attester as a process of its own: statements in, evidence out, and errors in words."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloister.trust.attestation import AttestationError, AttestationPolicy, report_data
from cloister.trust.attestation.process import AttesterBoot, RemoteAttester, make_attester, open_pair
from cloister.trust.attestation.software import SoftwareVerifier
from cloister.trust.attestation.tsm import TSM_REPORTS


@contextlib.contextmanager
def attester(boot: AttesterBoot) -> Iterator[tuple[RemoteAttester, subprocess.Popen[bytes]]]:
    near, far = open_pair()
    with near, far:
        module = "cloister.trust.attestation.process"
        with subprocess.Popen([sys.executable, "-m", module, str(far.fileno())], pass_fds=(far.fileno(),)) as process:
            far.close()
            yield RemoteAttester(near, boot), process
            near.close()
            assert process.wait(300) == 0


def test_a_statement_comes_back_as_evidence():
    with attester(AttesterBoot()) as (remote, _):
        for statement in (b"one", b"x" * 60_000):
            evidence = remote.attest(statement)
            assert evidence.statement == statement
            assert evidence.report_data == report_data(statement)
            assert SoftwareVerifier().verify(evidence, AttestationPolicy(accept_software=True), 0.0).accepted
        assert remote.kind == "software"


@pytest.mark.skipif(TSM_REPORTS.is_dir(), reason="this is a confidential guest")
def test_what_the_machine_lacks_comes_back_in_words():
    with attester(AttesterBoot(kind="sev-snp")) as (remote, _):
        for _ in range(2):  # it goes on answering
            with pytest.raises(AttestationError, match="no confidential guest"):
                remote.attest(b"statement")


def test_a_process_that_is_gone_is_said_to_be_gone():
    near, far = open_pair()
    with near:
        remote = RemoteAttester(near, AttesterBoot())
        far.close()
        with pytest.raises(AttestationError, match="restart the node"):
            remote.attest(b"statement")


def test_what_was_not_named_is_asked_for(tmp_path: Path):
    with pytest.raises(AttestationError, match="--intel-collateral"):
        make_attester(AttesterBoot(kind="tdx"))
    with pytest.raises(AttestationError, match="there is no attester sgx"):
        make_attester(AttesterBoot(kind="sgx"))
    assert make_attester(AttesterBoot(kind="sev-snp", gpus=True)).kind == "sev-snp"
