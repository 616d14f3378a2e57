"""A maker of GPUs of our own: certificates, reports after a real one, reference measurements and revocation statuses."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from lxml import etree
from signxml import CanonicalizationMethod, DigestAlgorithm, SignatureMethod, XMLSigner

from cloister.trust.attestation.certificates import load_certificates
from cloister.trust.attestation.revocation import encode_statuses
from tests import attestation_vectors as real
from tests.authority import Authority

_DICE_TCB_INFO = x509.ObjectIdentifier("2.23.133.5.4.1")
_TAG = """<SoftwareIdentity xmlns="http://standards.iso.org/iso/19770/-2/2015/schema.xsd" name="GH100" tagId="00" version="1.0">
<Meta colloquialVersion="{version}" product="GH100"/><Payload xmlns:h="http://www.w3.org/2001/04/xmlenc#sha384">
{resources}</Payload></SoftwareIdentity>"""
_RESOURCE = '<Resource type="Measurement" index="{index}" active="{active}" alternatives="{count}" {hashes} size="{size}"/>\n'


class GpuMaker:
    """NVIDIA's part: a chain for one GPU, and one for reference measurements."""

    def __init__(self) -> None:
        _, real_chain, _ = real.gpu_evidence()
        firmware = load_certificates(real_chain)[0].extensions.get_extension_for_oid(_DICE_TCB_INFO)
        self.root = Authority("device root")
        self.identity = Authority("identity", self.root)
        self.gpu = Authority("gpu", self.identity)
        self.signer = Authority("gpu firmware", self.gpu, is_authority=False, extension=firmware)
        self.rim_root = Authority("reference root")
        self.rim_signer = Authority("reference signer", Authority("reference values", self.rim_root), is_authority=False)

    def report(self, nonce: bytes, signer: Authority | None = None) -> bytes:
        """The real report of an H100, made for another nonce and signed by this GPU."""
        report, _, _ = real.gpu_evidence()
        signed = report[:4] + nonce + report[36:-96]
        r, s = decode_dss_signature((signer or self.signer).key.sign(signed, ECDSA(SHA384())))
        return signed + r.to_bytes(48, "big") + s.to_bytes(48, "big")

    def statuses(self, since: float, *, without: str = "") -> bytes:
        """OCSP responses that call all of both chains good, but for the certificate `without`."""
        chains = self.gpu.chain, self.rim_signer.chain
        pairs = [pair for chain in chains for pair in pairwise(chain)]
        answers = [(one, issuer.answer(one.certificate, since)) for one, issuer in pairs]
        return encode_statuses([answer for one, answer in answers if not _is_named(one, without)], [])

    def rim(self, version: str, values: Mapping[int, list[bytes]], **changes: object) -> bytes:
        """Signed reference measurements; `values` by index as a report counts (from 1)."""
        return self.sign(make_tag(version, values, **changes))

    def sign(self, tag: bytes, signer: Authority | None = None, **changes: object) -> bytes:
        """Returns a tag with an enveloped signature."""
        signing = signer or self.rim_signer
        config = {
            "signature_algorithm": SignatureMethod.ECDSA_SHA384,
            "digest_algorithm": DigestAlgorithm.SHA384,
            "c14n_algorithm": CanonicalizationMethod.CANONICAL_XML_1_1,
        }
        signed = XMLSigner(**(config | changes)).sign(etree.fromstring(tag), key=signing.key, cert=signing.certificates)  # type: ignore[arg-type]
        return bytes(etree.tostring(signed))


def make_tag(version: str, values: Mapping[int, list[bytes]], *, active: str = "True") -> bytes:
    """Reference measurements, not signed yet."""
    resources = [
        _RESOURCE.format(
            index=index - 1,
            active=active,
            count=len(alternatives),
            hashes=" ".join(f'h:Hash{number}="{value.hex()}"' for number, value in enumerate(alternatives)),
            size=len(alternatives[0]),
        )
        for index, alternatives in values.items()
    ]
    return _TAG.format(version=version, resources="".join(resources)).encode()


def _is_named(authority: Authority, name: str) -> bool:
    return authority.certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value == name


MAKER: Final = GpuMaker()
