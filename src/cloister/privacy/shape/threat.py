"""What shaped streams are there for, in the words of the threat matrix."""

from __future__ import annotations

from cloister.types.threat import Requirement, ThreatProfile

SHAPING_THREAT = ThreatProfile(
    row="speculation in general",
    threats=frozenset({Requirement.STATELESS}),
    residue="number of frames in private; bucket of that number in paranoid, and in private while drafts are verified",
    where=("network",),
    attack="traffic analysis: topic, length or accepted drafts from sizes and times of sealed chunks",
    mitigations=(
        "frames of one size",
        "one event a frame and one frame a tick",
        "paranoid, and drafts: a frame on every tick, in buckets",
    ),
)
