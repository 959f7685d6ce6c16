"""ONNX Runtime sessions of one attention, inputs and outputs bound to PyTorch's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.backends import graphs
from benchmarks.backends.base import Backend, Runner, UnsupportedError
from benchmarks.problems import Problem
from benchmarks.workloads import Workload

if TYPE_CHECKING:
    from torch import Tensor

_WHERE_LIMIT = 2**31  # elements
_COPIES = 4  # of the scores that an unfused graph may hold at a time


class Session(Backend):
    """A model of one of `graphs.FORMS`, with IOBinding, on PyTorch's current stream."""

    session = True

    def __init__(self, name: str, form: str, *, ours: bool = False) -> None:
        """`form` is a key of `graphs.FORMS`."""
        self.name, self._form, self.ours = name, form, ours
        self.rounds_scores = not ours

    def unavailable(self, device: str) -> str | None:
        """No ONNX Runtime, none with CUDA, no onnx, or no library of ours."""
        try:
            import onnx  # noqa: F401 - models are made with it
            import onnxruntime
        except ImportError as error:
            return f"{error}: pip install onnx 'onnxruntime-gpu>=1.28' (or onnxruntime)"
        if device == "cuda" and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            return f"onnxruntime {onnxruntime.__version__} at hand has no CUDA: pip install onnxruntime-gpu"
        return None

    def concerns(self, workload: Workload) -> bool:
        """Pages are for steps of generation alone."""
        return workload.cache or self._form not in graphs.STEPS

    def prepare(self, problem: Problem) -> Runner:
        """Makes the session and binds."""
        import onnxruntime
        import torch

        on_gpu = problem.device == "cuda"
        if self._form == "unfused":
            _refuse_too_large(problem)
        graph = graphs.FORMS[self._form](problem)
        session = _open(graph.model().SerializeToString(), on_gpu, self.ours)
        binding = session.io_binding()
        for bind, tensors in ((binding.bind_input, graph.inputs), (binding.bind_output, graph.outputs)):
            for name, x in tensors.items():
                bind(name, x.device.type, 0, graphs.element_type(x), list(x.shape), x.data_ptr())
        options = onnxruntime.RunOptions()
        if on_gpu:
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        y = next(iter(graph.outputs.values())).view(problem.q.shape)

        def run(graph: graphs.Graph = graph) -> Tensor:  # which keeps the bound tensors alive
            session.run_with_iobinding(binding, options)
            return y

        def blocking() -> None:
            session.run_with_iobinding(binding)
            torch.cuda.current_stream().synchronize()

        allocated = sum(x.nbytes for x in graph.outputs.values())
        return Runner(run, graph.note, allocated, capturable=False, blocking=blocking if on_gpu else None)


def _open(model: bytes, on_gpu: bool, ours: bool) -> Any:
    """A session on PyTorch's current stream, with our library for our operator alone.

    Raises:
        Exception: ONNX Runtime has no kernel for the model, or none on the GPU.
    """
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    providers: list[Any] = ["CPUExecutionProvider"]
    if on_gpu:
        stream = str(torch.cuda.current_stream().cuda_stream)
        # Exactly what is asked for, not the next power of two, so that memory can be compared.
        cuda = {"user_compute_stream": stream, "arena_extend_strategy": "kSameAsRequested"}
        providers = [("CUDAExecutionProvider", cuda)]
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if ours:
        import flashonnx

        session = flashonnx.session(model, providers, options)
    else:
        session = onnxruntime.InferenceSession(model, options, providers=providers)
    if on_gpu and "CUDAExecutionProvider" not in session.get_providers():
        raise UnsupportedError(
            "ONNX Runtime cannot load its CUDA provider here: CUDA's or cuDNN's libraries are missing"
        )
    return session


def _refuse_too_large(problem: Problem) -> None:
    workload = problem.workload
    scores = workload.batch * workload.heads[0] * workload.lengths[0] * workload.lengths[1]
    if (workload.causal or workload.mask) and scores >= _WHERE_LIMIT:
        # Its Where and what follows fail there, or end the process's use of the device (ONNX Runtime 1.31.1).
        raise UnsupportedError(f"ONNX Runtime counts the {scores} scores that are masked in 32 bits")
    if problem.device == "cuda":
        import torch

        free = torch.cuda.mem_get_info()[0]
    else:
        import os

        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = _COPIES * workload.score_bytes
    if needed > free:
        raise UnsupportedError(f"its scores would need up to {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free")
