"""The functions of libllama that we call, typed once, and those that must be there.

Parameters go by value as an opaque block larger than any known struct: the library writes its own
defaults into it and reads its own prefix of it, so members that we do not know keep theirs.
"""

from __future__ import annotations

import ctypes as ct
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

PARAMS_BYTES: Final = 512


class Params(ct.Structure):
    """`llama_model_params` or `llama_context_params`, and room behind it."""

    _fields_ = (("words", ct.c_uint64 * (PARAMS_BYTES // 8)),)


class Batch(ct.Structure):
    """`llama_batch`: arrays of `n_tokens` entries, given as addresses."""

    _fields_ = (
        ("n_tokens", ct.c_int32),
        ("token", ct.c_void_p),
        ("embd", ct.c_void_p),
        ("pos", ct.c_void_p),
        ("n_seq_id", ct.c_void_p),
        ("seq_id", ct.c_void_p),
        ("logits", ct.c_void_p),
    )


LogCallback = ct.CFUNCTYPE(None, ct.c_int, ct.c_char_p, ct.c_void_p)
ProgressCallback = ct.CFUNCTYPE(ct.c_bool, ct.c_float, ct.c_void_p)
AbortCallback = ct.CFUNCTYPE(ct.c_bool, ct.c_void_p)

Signature: TypeAlias = tuple[Any, tuple[Any, ...]]
_P: Final = ct.c_void_p
_I: Final = ct.c_int32
_N: Final = ct.c_size_t

REQUIRED: Final[Mapping[str, Signature]] = {
    "llama_log_set": (None, (_P, _P)),
    "llama_backend_init": (None, ()),
    "llama_model_default_params": (Params, ()),
    "llama_context_default_params": (Params, ()),
    "llama_model_load_from_file": (_P, (ct.c_char_p, Params)),
    "llama_model_free": (None, (_P,)),
    "llama_model_get_vocab": (_P, (_P,)),
    "llama_model_n_ctx_train": (_I, (_P,)),
    "llama_model_n_embd": (_I, (_P,)),
    "llama_model_n_layer": (_I, (_P,)),
    "llama_model_n_swa": (_I, (_P,)),
    "llama_model_size": (ct.c_uint64, (_P,)),
    "llama_model_has_encoder": (ct.c_bool, (_P,)),
    "llama_model_has_decoder": (ct.c_bool, (_P,)),
    "llama_model_is_recurrent": (ct.c_bool, (_P,)),
    "llama_model_is_hybrid": (ct.c_bool, (_P,)),
    "llama_model_is_diffusion": (ct.c_bool, (_P,)),
    "llama_init_from_model": (_P, (_P, Params)),
    "llama_free": (None, (_P,)),
    "llama_n_ctx": (ct.c_uint32, (_P,)),
    "llama_n_ctx_seq": (ct.c_uint32, (_P,)),
    "llama_n_batch": (ct.c_uint32, (_P,)),
    "llama_n_ubatch": (ct.c_uint32, (_P,)),
    "llama_n_seq_max": (ct.c_uint32, (_P,)),
    "llama_n_threads": (_I, (_P,)),
    "llama_n_threads_batch": (_I, (_P,)),
    "llama_pooling_type": (_I, (_P,)),
    "llama_get_memory": (_P, (_P,)),
    "llama_memory_clear": (None, (_P, ct.c_bool)),
    "llama_memory_seq_rm": (ct.c_bool, (_P, _I, _I, _I)),
    "llama_memory_seq_cp": (None, (_P, _I, _I, _I, _I)),
    "llama_memory_seq_pos_min": (_I, (_P, _I)),
    "llama_memory_seq_pos_max": (_I, (_P, _I)),
    "llama_state_seq_get_size": (_N, (_P, _I)),
    "llama_state_seq_get_data": (_N, (_P, _P, _N, _I)),
    "llama_state_seq_set_data": (_N, (_P, _P, _N, _I)),
    "llama_decode": (_I, (_P, Batch)),
    "llama_synchronize": (None, (_P,)),
    "llama_get_logits_ith": (_P, (_P, _I)),
    "llama_get_embeddings_ith": (_P, (_P, _I)),
    "llama_get_embeddings_seq": (_P, (_P, _I)),
    "llama_get_sampled_token_ith": (_I, (_P, _I)),
    "llama_vocab_n_tokens": (_I, (_P,)),
    "llama_vocab_bos": (_I, (_P,)),
    "llama_vocab_eos": (_I, (_P,)),
    "llama_vocab_is_eog": (ct.c_bool, (_P, _I)),
    "llama_vocab_is_control": (ct.c_bool, (_P, _I)),
    "llama_tokenize": (_I, (_P, ct.c_char_p, _I, _P, _I, ct.c_bool, ct.c_bool)),
    "llama_token_to_piece": (_I, (_P, _I, _P, _I, _I, ct.c_bool)),
    "llama_detokenize": (_I, (_P, _P, _I, _P, _I, ct.c_bool, ct.c_bool)),
    "llama_max_devices": (_N, ()),
    "llama_supports_gpu_offload": (ct.c_bool, ()),
    "llama_print_system_info": (ct.c_char_p, ()),
}
"""A library that lacks one of these is none that we can drive. `llama_get_sampled_token_ith` is
never called: builds from b7795 on have it, and no older layout is known."""

OPTIONAL: Final[Mapping[str, Signature]] = {
    "llama_version": (ct.c_char_p, ()),
    "llama_model_n_embd_out": (_I, (_P,)),
    "ggml_version": (ct.c_char_p, ()),
    "ggml_commit": (ct.c_char_p, ()),
}

BACKEND: Final[Mapping[str, Signature]] = {
    "ggml_backend_load_all_from_path": (None, (ct.c_char_p,)),
    "ggml_backend_dev_count": (_N, ()),
    "ggml_backend_dev_get": (_P, (_N,)),
    "ggml_backend_dev_name": (ct.c_char_p, (_P,)),
    "ggml_backend_dev_description": (ct.c_char_p, (_P,)),
    "ggml_backend_dev_type": (ct.c_int, (_P,)),
    "ggml_backend_dev_memory": (None, (_P, ct.POINTER(_N), ct.POINTER(_N))),
}
"""From libggml where it is a file of its own, else from the same file."""
