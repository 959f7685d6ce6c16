"""What `flashonnx doctor` examines, one function each."""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from flashonnx._capi import Library

_DRIVER = 580  # of CUDA 13, with which wheels are built
_GLIBC = (2, 34)
_PLUGIN_TIMEOUT = 120  # seconds
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_NO_LIBRARY = "not tried, as there is no library"


@dataclass
class Check:
    """What was found.

    Attributes:
        name: of what was examined.
        state: "ok", "absent" (not needed by everybody), "warning" or "wrong".
        found: what there is.
        todo: what to do about it; "" for nothing.
    """

    name: str
    state: str
    found: str
    todo: str = ""

    def content(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def every() -> dict[str, Callable[[], Check]]:
    """The checks, in the order in which they are told."""
    return {
        "system": system,
        "packages": packages,
        "library": library,
        "driver": driver,
        "device": device,
        "kernels": kernels,
        "ONNX Runtime": onnxruntime,
        "its CPU": lambda: _session("ONNX Runtime CPU", "CPUExecutionProvider"),
        "its CUDA": lambda: _session("ONNX Runtime CUDA", "CUDAExecutionProvider"),
        "TensorRT": lambda: _tensorrt("TensorRT", "tensorrt"),
        "TensorRT-RTX": lambda: _tensorrt("TensorRT-RTX", "tensorrt_rtx"),
        "PyTorch": lambda: _optional("PyTorch", "torch", (2, 9), "to export models"),
        "transformers": transformers,
        "Polygraphy": lambda: _optional("Polygraphy", "polygraphy", (0, 53), "to compare runtimes", "polygraphy"),
        "matplotlib": lambda: _optional("matplotlib", "matplotlib", (3, 8), "to draw reports", "plots"),
    }


def system() -> Check:
    """Linux with a C library that wheels run on, and Python."""
    found = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    name, version = platform.libc_ver()
    found += f", {name or 'C library unknown'} {version}".rstrip()
    if platform.system() != "Linux":
        return Check("system", "wrong", found, "flashonnx is for Linux (or WSL)")
    if name == "glibc" and _numbers(version) < _GLIBC:
        return Check("system", "warning", found, "the wheel needs glibc 2.34: build in a clone, pip install .")
    return Check("system", "ok", found)


def packages() -> Check:
    """What flashonnx itself needs, in versions that do."""
    try:
        needed = metadata.requires("flashonnx") or []
        found = f"flashonnx {metadata.version('flashonnx')}"
    except metadata.PackageNotFoundError:
        return Check("packages", "warning", "flashonnx is on the path, but not installed", "pip install .")
    wrong, versions = [], []
    for line in needed:
        parts = re.match(r"([\w.-]+)(?:\[.*?\])?\s*(?:>=([\d.]+))?", line)
        if parts is None or "extra ==" in line:
            continue
        version = _version(parts[1])
        if version is None or _numbers(version) < _numbers(parts[2] or "0"):
            wrong.append(f"'{parts[1]}>={parts[2]}'")
        versions.append(f"{parts[1]} {version}")
    if wrong:
        return Check("packages", "wrong", f"{found}: {', '.join(versions)}", f"pip install {' '.join(wrong)}")
    return Check("packages", "ok", f"{found} with {', '.join(versions)}")


def library() -> Check:
    """libflashonnx.so is there, loads, and is of this version."""
    import flashonnx
    from flashonnx._capi import Library

    try:
        path = flashonnx.library_path()
        version = Library(path).version()
    except flashonnx.LibraryError as error:
        found, _, todo = str(error).rpartition(": ")
        return Check("library", "wrong", found, todo)
    except OSError as error:
        todo = "install a wheel that was made for this machine, or pip install . in a clone"
        return Check("library", "wrong", str(error), todo)
    ours = flashonnx.__version__
    if ours not in (version, "0+source"):
        return Check("library", "warning", f"{path}, version {version}", f"the package is {ours}: use one version")
    return Check("library", "ok", f"{path}, version {version}")


def loaded() -> Library | None:
    """The library; None where none can be used, of which `library` says why, and what to do, for all others."""
    import flashonnx
    from flashonnx._capi import Library

    try:
        return Library(flashonnx.library_path())
    except (flashonnx.LibraryError, OSError):
        return None


def driver() -> Check:
    """NVIDIA's driver, by cuda-python where it is installed, else by what the kernel module says."""
    there = _KERNEL_MODULE.is_file()
    version = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _KERNEL_MODULE.read_text()) if there else None
    try:
        from cuda.bindings import driver as cuda
    except ImportError as error:
        if version is None:
            return Check("driver", "absent", f"no NVIDIA driver seen (cuda-python is not installed: {_line(error)})")
        return _judged(version[1], "", "pip install cuda-python to see more")
    try:
        status, number = cuda.cuDriverGetVersion()
    except Exception as error:  # cuda-python raises where there is no libcuda.so.1
        if version is not None:
            return Check("driver", "wrong", f"driver {version[1]}, but no libcuda.so.1", _line(error))
        return Check("driver", "absent", "no NVIDIA driver", "without one everything runs on the CPU")
    if int(status):
        return Check("driver", "wrong", f"the driver answers {status.name}", "see nvidia-smi")
    return _judged(version[1] if version else "", f"CUDA {number // 1000}.{number % 1000 // 10}", "")


def _judged(version: str, cuda: str, todo: str) -> Check:
    found = ", ".join(filter(None, (f"driver {version}" if version else "", cuda)))
    if version and _numbers(version) < (_DRIVER,):
        todo = (
            f"the wheel's CUDA 13 needs driver {_DRIVER} or newer: update it, or build with CUDA 12 (CONTRIBUTING.md)"
        )
        return Check("driver", "warning", found, todo)
    return Check("driver", "ok", found, todo)


def device() -> Check:
    """The GPUs, as cuda-python and the library see them."""
    from flashonnx._capi import CUDA
    from flashonnx._runtime import BUILD_WITH_CUDA

    names, here = device_names(), loaded()
    if here is None:
        return Check("device", "absent", ", ".join(names) or _NO_LIBRARY)
    try:
        seen = here.device(CUDA, 0)
    except NotImplementedError:
        if not names and not _KERNEL_MODULE.is_file():
            return Check("device", "absent", "no GPU seen, and no CUDA kernels in this build of the library")
        found = f"{', '.join(names) or 'a driver, so perhaps a GPU'}; no CUDA kernels in this build of the library"
        return Check("device", "warning" if names else "absent", found, f"for GPUs: {BUILD_WITH_CUDA}")
    except (RuntimeError, OSError) as error:
        why = _line(error).removeprefix("flashonnx_device_query: ")
        state = "wrong" if names or "too old" in why else "absent"
        return Check("device", state, ", ".join(names) or why, why if names else "")
    what = f"compute capability {seen.arch // 10}.{seen.arch % 10}, {seen.sm_count} multiprocessors"
    found = f"{', '.join(names) or 'a GPU'} ({what})"
    if seen.arch < 80:
        return Check("device", "warning", found, "there are kernels for compute capability 8.0 and newer")
    return Check("device", "ok", found)


def device_names() -> list[str]:
    try:
        from cuda.bindings import driver as cuda

        if int(cuda.cuInit(0)[0]):
            return []
        names = []
        for i in range(cuda.cuDeviceGetCount()[1]):
            handle = cuda.cuDeviceGet(i)[1]
            name = cuda.cuDeviceGetName(64, handle)[1].split(b"\0")[0].decode()
            names.append(f"{name}, {cuda.cuDeviceTotalMem(handle)[1] / 2**30:.0f} GiB")
        return names
    except Exception:  # no cuda-python, or no driver: `driver` says so
        return []


def kernels() -> Check:
    """Which kernel an everyday problem gets on the CPU and on the GPU here."""
    from flashonnx._capi import CPU, CUDA, DTYPES, attention_params

    library = loaded()
    if library is None:
        return Check("kernels", "absent", _NO_LIBRARY)
    x = np.zeros((8, 16, 512, 64), np.float32)
    parts, refused = [], []
    for where, kind in (("CPU", CPU), ("GPU", CUDA)):
        try:
            here = library.device(kind, 0)
        except (RuntimeError, NotImplementedError):
            continue
        found: dict[str, list[str]] = {}
        for dtype in ("float32", "float16", "bfloat16"):
            params = attention_params(library, here, x, x, x, x)
            for name in ("q", "k", "v", "o"):
                getattr(params, name).dtype = DTYPES[dtype]
            try:
                found.setdefault(library.supported(params), []).append(dtype)
            except (ValueError, NotImplementedError, RuntimeError) as error:
                refused.append(f"{where} {dtype}: {error}")
        parts += [f"{where}: {kernel} ({', '.join(dtypes)})" for kernel, dtypes in found.items()]
    if refused:
        return Check("kernels", "wrong", "; ".join([*parts, *refused]), "see docs/support.md")
    return Check("kernels", "ok", "; ".join(parts))


def onnxruntime() -> Check:
    """A version that will do, and one package of it, not two over each other."""
    from flashonnx._library import LibraryError
    from flashonnx._runtime import checked_onnxruntime

    try:
        module: Any = checked_onnxruntime()
    except LibraryError as error:
        found, _, todo = str(error).rpartition(": ")
        return Check("ONNX Runtime", "wrong", found, todo)
    found = f"{module.__version__}, {', '.join(module.get_available_providers())}"
    if len(installed := _in_one_folder()) > 1:
        todo = f"{' and '.join(installed)} overwrite each other in one folder: uninstall both, install one"
        return Check("ONNX Runtime", "warning", found, todo)
    return Check("ONNX Runtime", "ok", found)


def _session(name: str, provider: str) -> Check:
    """A session of one attention on that provider, compared with NumPy in float64."""
    import warnings

    import flashonnx
    from flashonnx._runtime import BUILD_WITH_CUDA, cuda_unavailable

    try:
        import onnxruntime as ort

        if provider not in ort.get_available_providers():
            useless = "onnxruntime-gpu" in _installed() or BUILD_WITH_CUDA in (cuda_unavailable() or "")
            todo = "" if useless else "for a GPU: pip install 'onnxruntime-gpu[cuda,cudnn]' in place of onnxruntime"
            return Check(name, "absent", "this ONNX Runtime has no such provider", todo)
        if loaded() is None:
            return Check(name, "absent", _NO_LIBRARY)
        if provider.startswith("CUDA") and (reason := cuda_unavailable()):
            return Check(name, "absent", reason)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            session = flashonnx.session(_model(), [provider])
        if provider not in session.get_providers():
            found = _line(caught[0].message) if caught else "the provider could not be used"
            return Check(name, "wrong", found, "CUDA or cuDNN is missing: pip install 'onnxruntime-gpu[cuda,cudnn]'")
        x = np.random.default_rng(0).standard_normal((3, 1, 33, 64)).astype(np.float32)
        y = session.run(None, dict(zip("qkv", x, strict=True)))[0]
    except Exception as error:
        return Check(name, "wrong", _line(error), "see docs/troubleshooting.md")
    distance = float(np.abs(y - _truth(*x)).max())
    if not distance < 1e-5:
        return Check(name, "wrong", f"an attention is off by {distance:.3g}", "please report it, with this output")
    return Check(name, "ok", f"computes an attention, off by {distance:.1g} from float64")


def _model() -> bytes:
    from onnx import TensorProto, helper

    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (1, "sequence", 64)) for n in "qkvy"]
    heads: dict[str, Any] = {"q_num_heads": 4, "kv_num_heads": 4, "is_causal": 1}
    node = helper.make_node("FlashAttention", list("qkv"), ["y"], domain="flashonnx", **heads)
    graph = helper.make_graph([node], "doctor", values[:3], values[3:])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("flashonnx", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def _truth(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of 4 heads over (1, S, 64), in float64."""
    q, k, v = (x.astype(np.float64).reshape(1, -1, 4, 16).swapaxes(1, 2) for x in (q, k, v))
    scores = q @ k.swapaxes(2, 3) / 4
    scores[..., np.triu(np.ones(scores.shape[2:], bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(1, -1, 64)


_REGISTER = """
import sys
import {module}
import flashonnx.tensorrt
flashonnx.tensorrt.register()
print({module}.__version__)
"""


def _tensorrt(name: str, module: str) -> Check:
    """The plugin is registered in a process of its own, as a broken installation may end it."""
    import importlib.util

    there = importlib.util.find_spec(module) is not None
    if (library := loaded()) is None:
        return Check(name, "absent", f"{_version(module) or 'installed'}, {_NO_LIBRARY}" if there else "not installed")
    if not library.has_tensorrt_plugin:
        found = f"{_version(module) or 'installed'}, but" if there else "not installed, and"
        headers = "build the library with CUDA and TensorRT's headers (CONTRIBUTING.md, Building)" if there else ""
        return Check(name, "absent", f"{found} no plugin for it in this build of the library", headers)
    if not there:
        return Check(name, "absent", "not installed", f"for engines: pip install {module.replace('_', '-')}")
    done = subprocess.run(
        [sys.executable, "-c", _REGISTER.format(module=module)],
        capture_output=True, text=True, timeout=_PLUGIN_TIMEOUT, check=False,
    )  # fmt: skip
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        why = lines[-1].partition(": ")[2] or lines[-1] if lines else f"the process ended with {done.returncode}"
        return Check(name, "wrong", why, "see docs/tensorrt.md")
    return Check(name, "ok", f"{done.stdout.strip().splitlines()[-1]}, the plugin registers")


def transformers() -> Check:
    """There, and not beside a torchvision of another torch, with which its models cannot be imported."""
    check = _optional("transformers", "transformers", (5,), "to export models of transformers")
    vision, torch = _version("torchvision"), (_version("torch") or "").partition("+")[0]
    if check.state != "ok" or vision is None or not torch:
        return check
    wanted = re.search(r"\btorch \(?==([\d.]+)", " ".join(metadata.requires("torchvision") or []))
    if wanted is None or wanted[1] == torch:
        return check
    found = f"{check.found}, but torchvision {vision} is for torch {wanted[1]}, not {torch}: importing its models fails"
    return Check("transformers", "warning", found, "pip uninstall torchvision, or install that of this torch")


def _optional(name: str, package: str, least: tuple[int, ...], purpose: str, extra: str = "") -> Check:
    version = _version(package)
    install = f"pip install 'flashonnx[{extra}]'" if extra else f"pip install '{package}>={'.'.join(map(str, least))}'"
    if version is None:
        return Check(name, "absent", f"not installed ({purpose})", install)
    if _numbers(version) < least:
        return Check(name, "warning", f"{version} is older than what was tried ({purpose})", install)
    return Check(name, "ok", version)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _in_one_folder() -> list[str]:
    """The packages that bring the module onnxruntime, if more than one does in the folder it comes from."""
    import onnxruntime

    folder = Path(onnxruntime.__file__).parent.parent
    found = []
    for name in ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            if Path(str(metadata.distribution(name).locate_file(""))).resolve() == folder.resolve():
                found.append(name)
    return found


def _installed() -> list[str]:
    return [name for name in ("onnxruntime", "onnxruntime-gpu") if _version(name)]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
