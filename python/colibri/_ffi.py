"""Raw ctypes mirror of ``include/colibri.h``: constants, structs, prototypes. Nothing is interpreted here.

``tests/python/test_ffi.py`` compares every size, offset, constant and function below with what the C compiler says
about the header. Structs are created by their ``init()`` (the header's ``_INIT`` macros): all zero but ``struct_size``.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from typing import Any

from . import _lib
from .errors import ColibriError, error_for

# ---- Constants -----------------------------------------------------------------------------------------------------

COLIBRI_VERSION_MAJOR = 0
COLIBRI_VERSION_MINOR = 1
COLIBRI_VERSION_PATCH = 0
COLIBRI_VERSION_STRING = "0.1.0"

COLIBRI_OK = 0
COLIBRI_ERR_INVALID_ARGUMENT = 1
COLIBRI_ERR_ALIGNMENT = 2
COLIBRI_ERR_OUT_OF_MEMORY = 3
COLIBRI_ERR_WORKSPACE = 4
COLIBRI_ERR_BUFFER_TOO_SMALL = 5
COLIBRI_ERR_NOT_FOUND = 6
COLIBRI_ERR_IO = 7
COLIBRI_ERR_FORMAT = 8
COLIBRI_ERR_VERSION = 9
COLIBRI_ERR_CHECKSUM = 10
COLIBRI_ERR_UNSUPPORTED = 11
COLIBRI_ERR_TOKEN = 12
COLIBRI_ERR_SLOT_FULL = 13
COLIBRI_ERR_STATE = 14
COLIBRI_ERR_NOT_FINITE = 15
COLIBRI_ERR_CANCELLED = 16
COLIBRI_ERR_NO_TOKENIZER = 17
COLIBRI_ERR_ISA = 18
COLIBRI_ERR_THREAD = 19
COLIBRI_STATUS_COUNT_ = 20

COLIBRI_ISA_AUTO = 0
COLIBRI_ISA_REF = 1
COLIBRI_ISA_AVX2 = 2
COLIBRI_ISA_AVX512 = 3
COLIBRI_ISA_AMX = 4
COLIBRI_ISA_NEON = 5
COLIBRI_ISA_COUNT_ = 6

COLIBRI_DTYPE_DEFAULT = 0
COLIBRI_DTYPE_F32 = 1
COLIBRI_DTYPE_F16 = 2
COLIBRI_DTYPE_BF16 = 3
COLIBRI_DTYPE_Q8 = 4
COLIBRI_DTYPE_Q4 = 5

COLIBRI_TOKENIZE_ADD_SPECIAL = 1
COLIBRI_TOKENIZE_PARSE_SPECIAL = 2
COLIBRI_DETOKENIZE_SPECIAL = 1

COLIBRI_OUTPUT_LAST = 0
COLIBRI_OUTPUT_ALL = 1
COLIBRI_OUTPUT_HIDDEN = 2

COLIBRI_RESIDENCY_DEFAULT = 0
COLIBRI_RESIDENCY_MAP = 1
COLIBRI_RESIDENCY_LOCK = 2
COLIBRI_RESIDENCY_HUGE = 3
COLIBRI_RESIDENCY_STREAM = 4
COLIBRI_RESIDENCY_COUNT_ = 5

COLIBRI_BALANCE_NONE = 0
COLIBRI_BALANCE_SOFT_CAPACITY = 1
COLIBRI_BALANCE_HARD_CAPACITY = 2

COLIBRI_PLACE_DISK = 0
COLIBRI_PLACE_MAPPED = 1
COLIBRI_PLACE_LOCKED = 2
COLIBRI_PLACE_MEMORY = 3
COLIBRI_PLACE_CACHED = 4
COLIBRI_PLACE_PINNED = 5

COLIBRI_HISTOGRAM = 28

COLIBRI_LOG_INFO = 1
COLIBRI_LOG_WARNING = 2

COLIBRI_SCALE_LEAST_SQUARES = 0
COLIBRI_SCALE_PERCENTILE = 1
COLIBRI_SCALE_MAX = 2

DTYPE_NAMES: dict[int, str] = {
    COLIBRI_DTYPE_F32: "f32",
    COLIBRI_DTYPE_F16: "f16",
    COLIBRI_DTYPE_BF16: "bf16",
    COLIBRI_DTYPE_Q8: "q8",
    COLIBRI_DTYPE_Q4: "q4",
}
"""From a ``colibri_dtype_t`` to the name used in this package."""

DTYPES: dict[str, int] = {name: code for code, name in DTYPE_NAMES.items()}

# ---- Structs -------------------------------------------------------------------------------------------------------


class _Sized(Structure):
    """A struct that begins with ``struct_size``."""

    @classmethod
    def init(cls, **fields: Any) -> Any:
        """A zeroed struct with struct_size and the given fields set."""
        return cls(struct_size=sizeof(cls), **fields)


class colibri_model_info_t(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("vocab_size", c_int32),
        ("hidden_size", c_int32),
        ("num_layers", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("moe_intermediate_size", c_int32),
        ("shared_intermediate_size", c_int32),
        ("dense_intermediate_size", c_int32),
        ("max_position", c_int32),
        ("dtype", c_int32),
        ("bos_token", c_int32),
        ("num_eos", c_int32),
        ("eos_token", c_int32 * 8),
        ("has_tokenizer", c_int32),
        ("has_chat_template", c_int32),
        ("file_size", c_uint64),
        ("num_parameters", c_uint64),
        ("active_bytes", c_uint64),
        ("model_type", c_char * 32),
    ]


class colibri_tensor_info_t(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("layer", c_int32),
        ("rows", c_int32),
        ("k", c_int32),
        ("count", c_int32),
        ("dtype", c_int32),
        ("offset", c_uint64),
        ("size", c_uint64),
        ("role", c_char * 32),
    ]


class colibri_stream_t(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("started", c_uint32),
        ("num_pending", c_uint32),
        ("pending", c_uint8 * 16),
    ]


colibri_log_fn = CFUNCTYPE(None, c_int, c_char_p, c_void_p)


class colibri_config_t(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("device_id", c_int32),
        ("model_path", c_char_p),
        ("model", c_void_p),
        ("max_batch_size", c_int32),
        ("max_seq_len", c_int32),
        ("dtype", c_int32),
        ("top_k", c_int32),
        ("num_threads", c_int32),
        ("isa", c_int32),
        ("outputs", c_int32),
        ("kv_dtype", c_int32),
        ("activation_bits", c_int32),
        ("max_chunk_tokens", c_int32),
        ("workspace", c_void_p),
        ("workspace_size", c_size_t),
        ("expert_cache_size", c_uint64),
        ("hugepage_size", c_uint64),
        ("numa_policy", c_char_p),
        ("load_balancing_strategy", c_int32),
        ("reserved0", c_int32),
        ("log", colibri_log_fn),
        ("log_user_data", c_void_p),
        ("cpu_affinity", c_char_p),
        ("residency", c_int32),
        ("capacity_factor", c_float),
        ("expert_profile", c_char_p),
        ("guard_mapping", c_int32),
        ("reserved1", c_int32),
        ("model_data", c_void_p),
        ("model_size", c_size_t),
        ("parallel_for", c_void_p),
        ("parallel_for_user_data", c_void_p),
    ]


class colibri_sampling_t(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("temperature", c_float),
        ("top_k", c_int32),
        ("top_p", c_float),
        ("min_p", c_float),
        ("repetition_penalty", c_float),
        ("seed", c_uint64),
    ]


class colibri_stats_t(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("num_threads", c_int32),
        ("isa", c_int32),
        ("num_layers", c_int32),
        ("num_experts", c_int32),
        ("reserved0", c_int32),
        ("workspace_bytes", c_uint64),
        ("kv_bytes", c_uint64),
        ("infer_calls", c_uint64),
        ("prompt_tokens", c_uint64),
        ("decode_tokens", c_uint64),
        ("infer_ns", c_uint64),
        ("last_infer_ns", c_uint64),
        ("attention_ns", c_uint64),
        ("router_ns", c_uint64),
        ("experts_ns", c_uint64),
        ("head_ns", c_uint64),
        ("weight_bytes", c_uint64),
        ("residency", c_int32),
        ("guarded", c_int32),
        ("hugepage_size", c_uint64),
        ("hugepage_bytes", c_uint64),
        ("hugepage_pool", c_int32),
        ("direct_io", c_int32),
        ("numa_nodes", c_int32),
        ("memory_short", c_int32),
        ("cache_experts", c_uint64),
        ("cache_pinned", c_uint64),
        ("cache_hits", c_uint64),
        ("cache_misses", c_uint64),
        ("cache_hits_ahead", c_uint64),
        ("read_bytes", c_uint64),
        ("read_bytes_ahead", c_uint64),
        ("read_wait_ns", c_uint64),
        ("ahead_predicted", c_uint64),
        ("ahead_correct", c_uint64),
        ("repeat_correct", c_uint64),
        ("capacity_moved", c_uint64),
        ("capacity_dropped", c_uint64),
        ("infer_histogram", c_uint64 * COLIBRI_HISTOGRAM),
        ("read_histogram", c_uint64 * COLIBRI_HISTOGRAM),
    ]


class colibri_expert_stats_t(Structure):
    _fields_ = [
        ("tokens", c_uint64),
        ("calls", c_uint64),
        ("load_ns", c_uint64),
        ("compute_ns", c_uint64),
        ("merge_ns", c_uint64),
        ("hits", c_uint64),
        ("misses", c_uint64),
        ("bytes_read", c_uint64),
        ("place", c_int32),
        ("node", c_int32),
    ]


class colibri_pack_t(_Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("src_dtype", c_int32),
        ("dst_dtype", c_int32),
        ("scale_rule", c_int32),
        ("src", c_void_p),
        ("src_stride", c_uint64),
        ("rows", c_uint32),
        ("k", c_uint32),
        ("dst", c_void_p),
        ("dst_block_stride", c_uint64),
        ("dst_scale", c_void_p),
        ("dst_scale_stride", c_uint64),
        ("squared_error", c_double),
        ("squared_norm", c_double),
    ]


# ---- Prototypes ----------------------------------------------------------------------------------------------------
# Objects (colibri_model_t *, colibri_t *) and plain data pointers are c_void_p. A status is c_int.

_status = c_int
_text_out = POINTER(c_void_p)  # const char ** that is not zero-terminated

PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "colibri_status_name": (c_char_p, [c_int]),
    "colibri_last_status": (_status, []),
    "colibri_last_error": (c_char_p, []),
    "colibri_version": (c_char_p, []),
    "colibri_build_info": (c_char_p, []),
    "colibri_cpu_info": (c_char_p, []),
    "colibri_isa_name": (c_char_p, [c_int]),
    "colibri_isa_from_name": (c_int, [c_char_p]),
    "colibri_isa_supported": (c_int, [c_int]),
    "colibri_model_open": (_status, [c_char_p, POINTER(c_void_p)]),
    "colibri_model_open_memory": (_status, [c_void_p, c_size_t, POINTER(c_void_p)]),
    "colibri_model_close": (None, [c_void_p]),
    "colibri_model_info": (_status, [c_void_p, POINTER(colibri_model_info_t)]),
    "colibri_model_verify": (_status, [c_void_p]),
    "colibri_model_chat_template": (_status, [c_void_p, _text_out, POINTER(c_size_t)]),
    "colibri_model_metadata": (_status, [c_void_p, _text_out, POINTER(c_size_t)]),
    "colibri_model_tensor": (_status, [c_void_p, c_size_t, POINTER(colibri_tensor_info_t)]),
    "colibri_tokenize": (_status, [c_void_p, c_char_p, c_size_t, c_uint32, c_void_p, c_size_t, POINTER(c_size_t)]),
    "colibri_detokenize": (_status, [c_void_p, c_void_p, c_size_t, c_uint32, c_void_p, c_size_t, POINTER(c_size_t)]),
    "colibri_stream_token": (
        _status,
        [c_void_p, POINTER(colibri_stream_t), c_int32, c_void_p, c_size_t, POINTER(c_size_t)],
    ),
    "colibri_workspace_size": (_status, [POINTER(colibri_config_t), POINTER(c_size_t)]),
    "colibri_init": (c_void_p, [POINTER(colibri_config_t)]),
    "colibri_free": (None, [c_void_p]),
    "colibri_model": (c_void_p, [c_void_p]),
    "colibri_set_input": (_status, [c_void_p, c_void_p, c_void_p, c_int32]),
    "colibri_infer": (_status, [c_void_p]),
    "colibri_get_output": (_status, [c_void_p, c_void_p, c_size_t]),
    "colibri_output_size": (_status, [c_void_p, POINTER(c_size_t)]),
    "colibri_slot_status": (_status, [c_void_p, c_int32]),
    "colibri_slot_length": (c_int32, [c_void_p, c_int32]),
    "colibri_truncate": (_status, [c_void_p, c_int32, c_int32]),
    "colibri_reset": (_status, [c_void_p]),
    "colibri_cancel": (None, [c_void_p]),
    "colibri_sample": (_status, [c_void_p, c_int32, POINTER(colibri_sampling_t), POINTER(c_int32)]),
    "colibri_moe_forward": (_status, [c_void_p, c_int32, c_void_p, c_int32, c_void_p]),
    "colibri_route_tokens": (_status, [c_void_p, c_int32, c_void_p, c_int32, c_void_p, c_void_p]),
    "colibri_stats": (_status, [c_void_p, POINTER(colibri_stats_t)]),
    "colibri_expert_stats": (_status, [c_void_p, c_int32, POINTER(colibri_expert_stats_t), c_size_t]),
    "colibri_stats_reset": (None, [c_void_p]),
    "colibri_metrics": (_status, [c_void_p, c_void_p, c_size_t, POINTER(c_size_t)]),
    "colibri_save_profile": (_status, [c_void_p, c_char_p]),
    "colibri_packed_size": (c_uint64, [c_int32, c_uint32, c_uint32]),
    "colibri_pack_matrix": (_status, [POINTER(colibri_pack_t)]),
    "colibri_crc32": (c_uint32, [c_uint32, c_void_p, c_size_t]),
}

_library: ctypes.CDLL | None = None
_loading = threading.Lock()


def _configure(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give every function its prototype; refuse a library of another version or one that lacks a function."""
    for name, (restype, argtypes) in PROTOTYPES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise ColibriError(
                f"{_lib.library_path()} has no function {name}; it does not belong to this package"
            ) from None
        function.restype = restype
        function.argtypes = argtypes
    version = library.colibri_version().decode()
    if version != COLIBRI_VERSION_STRING:
        raise ColibriError(
            f"{_lib.library_path()} is version {version}, this package is {COLIBRI_VERSION_STRING}; build it again"
        )
    return library


def lib() -> ctypes.CDLL:
    """The configured shared library, loaded at the first call. Raises ColibriError if it is missing or foreign."""
    global _library
    if _library is None:
        with _loading:
            if _library is None:
                _library = _configure(_lib.load())
    return _library


def check(status: int) -> None:
    """Raise the exception of a failed call, with the library's sentence. To be called on the thread that made the
    call.
    """
    if status != COLIBRI_OK:
        raise last_error(status)


def last_error(status: int | None = None) -> ColibriError:
    """The exception for this thread's latest failed call; `status` None asks the library for it too."""
    library = lib()
    code = library.colibri_last_status() if status is None else status
    return error_for(code, (library.colibri_last_error() or b"").decode("utf-8", "replace"))
