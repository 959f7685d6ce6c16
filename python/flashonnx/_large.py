"""Models beyond protobuf's 2 GB, which go to a file with their weights beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

LIMIT = 2**31 - 1


def is_large(model: onnx.ModelProto) -> bool:
    """Whether protobuf cannot write `model` as one message. Of such a one it may not even tell how large it is."""
    from google.protobuf.message import EncodeError

    try:
        return model.ByteSize() > LIMIT
    except (EncodeError, ValueError):
        return True
