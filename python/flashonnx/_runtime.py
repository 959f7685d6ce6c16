"""Registering the library with ONNX Runtime, and sessions that have it."""

from __future__ import annotations

import os
import re
import tempfile
import warnings
import weakref
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashonnx._large import is_large
from flashonnx._library import LibraryError, library_path

if TYPE_CHECKING:
    import onnx
    import onnxruntime

MINIMUM_ONNXRUNTIME = (1, 28)
_INSTALL = "pip install 'onnxruntime>={0}' (CPU) or 'onnxruntime-gpu>={0}' (CUDA)".format(
    ".".join(map(str, MINIMUM_ONNXRUNTIME))
)

BUILD_WITH_CUDA = (
    "build it where nvcc is, with FLASHONNX_CUDA=ON (CONTRIBUTING.md, Building), or install a wheel with CUDA"
)

# Which library each SessionOptions already has. Weak: options may be dropped at any time, and pybind objects take no
# attributes.
_registered: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def register(session_options: onnxruntime.SessionOptions) -> None:
    """Adds flashonnx's operators to an ONNX Runtime `SessionOptions`; doing it again changes nothing.

    ONNX Runtime itself refuses a session whose options got one library twice ("Domain already set in registry"). This
    function remembers what it registered, but cannot see a `register_custom_ops_library` that someone else called: use
    one of the two.

    Raises:
        LibraryError: no suitable library or no suitable ONNX Runtime; the message says what to do.
    """
    ort = checked_onnxruntime()
    path = library_path()
    if not isinstance(session_options, ort.SessionOptions):
        raise TypeError(f"register: expected an onnxruntime.SessionOptions, got {type(session_options).__name__}")
    known = _registered.get(session_options)
    if known == path:
        return
    if known is not None:
        raise LibraryError(
            f"these session options already have {known}; they cannot have {path} too: use new session options"
        )
    try:
        session_options.register_custom_ops_library(path)
    except Exception as error:
        raise LibraryError(
            f"ONNX Runtime {ort.__version__} cannot load {path}: {_first_line(error)} "
            "(if another shared library is named here, it is missing on this machine; else install flashonnx again)"
        ) from error
    _registered[session_options] = path


def session(
    path_or_bytes: str | os.PathLike[str] | bytes | onnx.ModelProto,
    providers: list[Any] | None = None,
    session_options: onnxruntime.SessionOptions | None = None,
) -> onnxruntime.InferenceSession:
    """An `onnxruntime.InferenceSession` in which flashonnx's operators run.

    Args:
        path_or_bytes: an ONNX file, its bytes, or an `onnx.ModelProto` (without external data, or with it loaded).
        providers: as for `InferenceSession`. Default: CUDA where this ONNX Runtime has it, flashonnx was built with it
            and a device is there, then the CPU.
        session_options: yours, to which the library is then registered; it may be there already through `register`.

    Raises:
        LibraryError: the library or ONNX Runtime is missing, unsuitable or too old; the message says what to do.
        FileNotFoundError: there is no such model file.
        ValueError: it is not an ONNX model.
    """
    ort = checked_onnxruntime()
    options = session_options if session_options is not None else ort.SessionOptions()
    register(options)
    if isinstance(providers, str):
        raise TypeError(f"session: providers is expected to be a list, got '{providers}': write ['{providers}']")
    if providers is None:
        providers = default_providers()
    wanted = [provider if isinstance(provider, str) else provider[0] for provider in providers]
    if "CUDAExecutionProvider" in wanted and hasattr(ort, "preload_dlls"):
        _preload(ort)
    if isinstance(path_or_bytes, (str, os.PathLike)) and not Path(path_or_bytes).is_file():
        raise FileNotFoundError(f"session: there is no model file {os.fspath(path_or_bytes)}")
    with tempfile.TemporaryDirectory(prefix="flashonnx-") as scratch:  # used by models beyond protobuf's 2 GB alone
        try:
            result = ort.InferenceSession(_loadable(path_or_bytes, scratch), options, providers=providers)
        except Exception as error:
            if "Domain already set in registry" in str(error):
                raise LibraryError(
                    "the library was registered twice with these options: flashonnx.register, flashonnx.session "
                    "and register_custom_ops_library each do it; call only one of them on one SessionOptions "
                    "(ONNX Runtime says 'Domain already set in registry')"
                ) from error
            if "protobuf" in str(error).lower():  # what cannot be parsed, or has no graph
                what = os.fspath(path_or_bytes) if isinstance(path_or_bytes, (str, os.PathLike)) else "what was given"
                raise ValueError(f"session: {what} is not an ONNX model: {_first_line(error)}") from error
            if "Could not find an implementation for" in str(error):
                error.add_note(
                    f"none of {', '.join(wanted)} has this operator in this type; the CPU's has few in bfloat16: load "
                    "the model in float32 (dtype=torch.float32) and export that, or run it on CUDA"
                )
            raise
    lost = [provider for provider in wanted if provider not in result.get_providers()]
    if lost:
        warnings.warn(
            f"ONNX Runtime could not use {', '.join(lost)}; the session runs on {result.get_providers()}", stacklevel=2
        )
    return result


def default_providers() -> list[str]:
    """CUDA if this ONNX Runtime has it and the library sees a device, then the CPU."""
    ort = checked_onnxruntime()
    providers = ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" in ort.get_available_providers() and cuda_unavailable() is None:
        providers.insert(0, "CUDAExecutionProvider")
    return providers


def cuda_unavailable() -> str | None:
    """Why the library's CUDA kernels cannot be used here, and what to do where it has none; None if they can."""
    from flashonnx._capi import CUDA, Library

    try:
        Library(library_path()).device(CUDA, 0)
    except NotImplementedError:
        return f"this build of the library has no CUDA kernels: {BUILD_WITH_CUDA}"
    except (RuntimeError, OSError, ValueError) as error:
        return str(error).removeprefix("flashonnx_device_query: ")
    return None


def checked_onnxruntime() -> ModuleType:
    """The onnxruntime module, checked: older ones abort in shape inference and run the wrong function overload."""
    needed = ".".join(map(str, MINIMUM_ONNXRUNTIME))
    try:
        import onnxruntime
    except ImportError as error:
        raise LibraryError(
            f"flashonnx needs ONNX Runtime {needed} or newer, and onnxruntime cannot be imported ({error}): {_INSTALL}"
        ) from error
    found = getattr(onnxruntime, "__version__", "unknown")
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if numbers < MINIMUM_ONNXRUNTIME:
        raise LibraryError(f"flashonnx needs ONNX Runtime {needed} or newer, found {found}: {_INSTALL}")
    return onnxruntime


def _loadable(model: Any, scratch: str) -> str | bytes:
    if isinstance(model, (str, os.PathLike)):
        return os.fspath(model)
    if isinstance(model, (bytes, bytearray, memoryview)):
        return bytes(model)
    import onnx

    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"session: expected a path, bytes or an onnx.ModelProto, got {type(model).__name__}")
    if not is_large(model):
        return model.SerializeToString()
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    path = os.path.join(scratch, "model.onnx")
    onnx.save_model(copy, path, save_as_external_data=True, location="model.data")
    return path


def _preload(ort: ModuleType) -> None:
    """Lets onnxruntime-gpu find the CUDA libraries of NVIDIA's wheels, if CUDA came that way."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()):  # it prints one line for each library that is not a wheel
        ort.preload_dlls()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
