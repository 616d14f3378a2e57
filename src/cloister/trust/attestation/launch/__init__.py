"""Predicts the launch measurements of a machine image: the values that a report of SEV-SNP or TDX will contain.

Pure: no I/O, no clock. `Firmware` reads OVMF, `measure_snp` and `measure_td` compute the processor's values from the image and
the hypervisor's settings alone.
"""

from cloister.trust.attestation.launch.firmware import DirectBoot, Firmware, read_firmware
from cloister.trust.attestation.launch.snp import CPU_SIGNATURES, measure_snp
from cloister.trust.attestation.launch.tdx import TdMeasurements, measure_td

__all__ = [
    "CPU_SIGNATURES",
    "DirectBoot",
    "Firmware",
    "TdMeasurements",
    "measure_snp",
    "measure_td",
    "read_firmware",
]
