"""What the client checks of images before it seals a request. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from cloister.client.errors import ImagesRefusedError
from cloister.policy.policy import Policy
from cloister.policy.verdict import Profile
from cloister.trust.shape import SIZE_CLASSES, SizeClass
from cloister.types.errors import ConfigError

_KINDS: Final = frozenset({"image_url", "input_image", "image"})
"""Types of the parts of a message that are images."""


def find_size_class(name: str | None) -> SizeClass | None:
    """Returns the size class of a name; None for none.

    Raises:
        ConfigError: there is no such class.
    """
    if name is not None and name not in SIZE_CLASSES:
        raise ConfigError(f"size_class is one of {', '.join(SIZE_CLASSES)}", param="size_class")
    return None if name is None else SIZE_CLASSES[name]


def check_images(content: bytes, profile: str, size_class: SizeClass | None) -> None:
    """Refuses a request with images before it is sealed.

    Args:
        content: its body.
        profile: of the nodes, as the log and their evidence state it.
        size_class: of the session.

    Raises:
        ImagesRefusedError: the profile refuses images, or they need a size class.
    """
    if not has_images(content):
        return
    policy = Policy(profile)
    if not policy.allows("image-inputs"):
        reason = policy.ruling("image-inputs").text
        raise ImagesRefusedError(f"The profile `{profile}` of this cloud takes no images ({reason}); send text only.")
    if policy.profile is Profile.PRIVATE and size_class is None:
        raise ImagesRefusedError(
            "Nothing would hide that this request has images: choose a size class for all requests of the session, "
            "Session(size_class=...) or cloister proxy --size-class, one of " + ", ".join(SIZE_CLASSES) + "."
        )


def has_images(content: bytes) -> bool:
    """Whether a body has a part that is an image. One that is no JSON has none: nodes read no other."""
    if b"image" not in content and b"\\u" not in content:
        return False
    try:
        return _holds_images(msgspec.json.decode(content))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _holds_images(value: Any) -> bool:
    if isinstance(value, dict):
        kind = value.get("type")
        return (isinstance(kind, str) and kind in _KINDS) or any(map(_holds_images, value.values()))
    return isinstance(value, list) and any(map(_holds_images, value))
