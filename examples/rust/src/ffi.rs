//! The declarations of colibri.h that this program needs, word by word, and nothing else. Structs have the header's fields in
//! the header's order; `struct_size` must be their size (`Default` sees to it), zero in a field is the library's default.
#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_int, c_void};

/// Objects that only pointers know.
#[repr(C)]
pub struct colibri_model_t {
    _private: [u8; 0],
}
#[repr(C)]
pub struct colibri_t {
    _private: [u8; 0],
}

pub type colibri_status_t = c_int;
pub const COLIBRI_OK: colibri_status_t = 0;
pub const COLIBRI_ERR_BUFFER_TOO_SMALL: colibri_status_t = 5;
pub const COLIBRI_TOKENIZE_ADD_SPECIAL: u32 = 1;

pub type colibri_log_fn = Option<unsafe extern "C" fn(c_int, *const c_char, *mut c_void)>;
pub type colibri_task_fn = unsafe extern "C" fn(*mut c_void, i32);
pub type colibri_parallel_for_fn = Option<unsafe extern "C" fn(colibri_task_fn, *mut c_void, i32, *mut c_void)>;

#[repr(C)]
pub struct colibri_config_t {
    pub struct_size: u32,
    pub device_id: i32,
    pub model_path: *const c_char,
    pub model: *mut colibri_model_t,
    pub max_batch_size: i32,
    pub max_seq_len: i32,
    pub dtype: i32,
    pub top_k: i32,
    pub num_threads: i32,
    pub isa: i32,
    pub outputs: i32,
    pub kv_dtype: i32,
    pub activation_bits: i32,
    pub max_chunk_tokens: i32,
    pub workspace: *mut c_void,
    pub workspace_size: usize,
    pub expert_cache_size: u64,
    pub hugepage_size: u64,
    pub numa_policy: *const c_char,
    pub load_balancing_strategy: i32,
    pub reserved0: i32,
    pub log: colibri_log_fn,
    pub log_user_data: *mut c_void,
    pub cpu_affinity: *const c_char,
    pub residency: i32,
    pub capacity_factor: f32,
    pub expert_profile: *const c_char,
    pub guard_mapping: i32,
    pub reserved1: i32,
    pub model_data: *const c_void,
    pub model_size: usize,
    pub parallel_for: colibri_parallel_for_fn,
    pub parallel_for_user_data: *mut c_void,
}

#[repr(C)]
pub struct colibri_model_info_t {
    pub struct_size: u32,
    pub vocab_size: i32,
    pub hidden_size: i32,
    pub num_layers: i32,
    pub num_heads: i32,
    pub num_kv_heads: i32,
    pub head_dim: i32,
    pub num_experts: i32,
    pub top_k: i32,
    pub moe_intermediate_size: i32,
    pub shared_intermediate_size: i32,
    pub dense_intermediate_size: i32,
    pub max_position: i32,
    pub dtype: i32,
    pub bos_token: i32,
    pub num_eos: i32,
    pub eos_token: [i32; 8],
    pub has_tokenizer: i32,
    pub has_chat_template: i32,
    pub file_size: u64,
    pub num_parameters: u64,
    pub active_bytes: u64,
    pub model_type: [c_char; 32],
}

#[repr(C)]
pub struct colibri_stream_t {
    pub struct_size: u32,
    pub flags: u32,
    pub started: u32,
    pub num_pending: u32,
    pub pending: [u8; 16],
}

/// Zero but for struct_size, as the header's _INIT macros.
macro_rules! sized_default {
    ($($name:ty),*) => {$(
        impl Default for $name {
            fn default() -> Self {
                // Safety: all fields are numbers, pointers or optional functions, for which zero bytes are values.
                let mut value: Self = unsafe { std::mem::zeroed() };
                value.struct_size = std::mem::size_of::<Self>() as u32;
                value
            }
        }
    )*};
}
sized_default!(colibri_config_t, colibri_model_info_t, colibri_stream_t);

extern "C" {
    pub fn colibri_status_name(status: colibri_status_t) -> *const c_char;
    pub fn colibri_last_status() -> colibri_status_t;
    pub fn colibri_last_error() -> *const c_char;
    pub fn colibri_model_open(path: *const c_char, model: *mut *mut colibri_model_t) -> colibri_status_t;
    pub fn colibri_model_close(model: *mut colibri_model_t);
    pub fn colibri_model_info(model: *const colibri_model_t, info: *mut colibri_model_info_t) -> colibri_status_t;
    pub fn colibri_tokenize(
        model: *const colibri_model_t,
        text: *const c_char,
        bytes: usize,
        flags: u32,
        tokens: *mut i32,
        capacity: usize,
        count: *mut usize,
    ) -> colibri_status_t;
    pub fn colibri_stream_token(
        model: *const colibri_model_t,
        stream: *mut colibri_stream_t,
        token: i32,
        text: *mut c_char,
        capacity: usize,
        bytes: *mut usize,
    ) -> colibri_status_t;
    pub fn colibri_init(config: *const colibri_config_t) -> *mut colibri_t;
    pub fn colibri_free(ctx: *mut colibri_t);
    pub fn colibri_set_input(ctx: *mut colibri_t, tokens: *const i32, lengths: *const i32, batch: i32) -> colibri_status_t;
    pub fn colibri_infer(ctx: *mut colibri_t) -> colibri_status_t;
    pub fn colibri_sample(ctx: *mut colibri_t, slot: i32, sampling: *const c_void, token: *mut i32) -> colibri_status_t;
}
