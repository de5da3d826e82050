//! A safe face for what ffi.rs declares: objects that close themselves, `Result` instead of statuses. Sessions may move to another
//! thread, and are used by one at a time; models may be shared.

use crate::ffi::*;
use std::ffi::{CStr, CString};
use std::fmt;
use std::ptr;

/// The library's sentence and the name of its status.
#[derive(Debug)]
pub struct Error {
    pub status: colibri_status_t,
    sentence: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Safety: static, never null.
        let name = unsafe { CStr::from_ptr(colibri_status_name(self.status)) };
        write!(f, "{} ({})", self.sentence, name.to_string_lossy())
    }
}

impl std::error::Error for Error {}

/// Of this thread's latest failed call.
fn last_error() -> Error {
    // Safety: valid until this thread's next call, copied at once.
    let sentence = unsafe { CStr::from_ptr(colibri_last_error()) };
    Error { status: unsafe { colibri_last_status() }, sentence: sentence.to_string_lossy().into_owned() }
}

fn check(status: colibri_status_t) -> Result<(), Error> {
    if status == COLIBRI_OK {
        Ok(())
    } else {
        Err(last_error())
    }
}

pub struct Model {
    handle: *mut colibri_model_t,
}

// Safety: colibri.h: functions on a model may be called from any number of threads at once.
unsafe impl Send for Model {}
unsafe impl Sync for Model {}

impl Drop for Model {
    fn drop(&mut self) {
        unsafe { colibri_model_close(self.handle) }
    }
}

impl Model {
    pub fn open(path: &str) -> Result<Model, Box<dyn std::error::Error>> {
        let path = CString::new(path)?;
        let mut handle = ptr::null_mut();
        check(unsafe { colibri_model_open(path.as_ptr(), &mut handle) })?;
        Ok(Model { handle })
    }

    /// The ids at which a text ends.
    pub fn end_tokens(&self) -> Result<Vec<i32>, Error> {
        let mut info = colibri_model_info_t::default();
        check(unsafe { colibri_model_info(self.handle, &mut info) })?;
        Ok(info.eos_token[..info.num_eos as usize].to_vec())
    }

    pub fn tokenize(&self, text: &str) -> Result<Vec<i32>, Error> {
        let mut tokens = vec![0i32; text.len() + 8];
        loop {
            let mut count = 0;
            let status = unsafe {
                colibri_tokenize(
                    self.handle,
                    text.as_ptr().cast(),
                    text.len(),
                    COLIBRI_TOKENIZE_ADD_SPECIAL,
                    tokens.as_mut_ptr(),
                    tokens.len(),
                    &mut count,
                )
            };
            tokens.resize(count, 0);
            if status != COLIBRI_ERR_BUFFER_TOO_SMALL {
                check(status)?;
                return Ok(tokens);
            }
        }
    }

    pub fn stream(&self) -> TextStream<'_> {
        TextStream { model: self, state: colibri_stream_t::default() }
    }
}

/// Tokens in, whole characters out.
pub struct TextStream<'m> {
    model: &'m Model,
    state: colibri_stream_t,
}

impl TextStream<'_> {
    /// Token -1 ends the text: what still waits comes out.
    pub fn add(&mut self, token: i32) -> Result<String, Error> {
        let mut text = vec![0u8; 64];
        loop {
            let mut bytes = 0;
            let status = unsafe {
                colibri_stream_token(
                    self.model.handle,
                    &mut self.state,
                    token,
                    text.as_mut_ptr().cast(),
                    text.len(),
                    &mut bytes,
                )
            };
            text.resize(bytes, 0);
            if status != COLIBRI_ERR_BUFFER_TOO_SMALL {
                check(status)?;
                return Ok(String::from_utf8_lossy(&text).into_owned());
            }
        }
    }
}

/// One sequence. Holds a reference to its model of its own.
pub struct Session {
    handle: *mut colibri_t,
}

// Safety: a session belongs to no thread; `&mut self` keeps it to one at a time.
unsafe impl Send for Session {}

impl Drop for Session {
    fn drop(&mut self) {
        unsafe { colibri_free(self.handle) }
    }
}

impl Session {
    pub fn new(model: &Model) -> Result<Session, Error> {
        let config = colibri_config_t { model: model.handle, ..Default::default() };
        let handle = unsafe { colibri_init(&config) };
        if handle.is_null() {
            Err(last_error())
        } else {
            Ok(Session { handle })
        }
    }

    /// Append tokens and give the most likely next one.
    pub fn next(&mut self, tokens: &[i32]) -> Result<i32, Error> {
        let length = i32::try_from(tokens.len()).expect("fewer than 2^31 tokens");
        let mut token = -1;
        unsafe {
            check(colibri_set_input(self.handle, tokens.as_ptr(), &length, 1))?;
            check(colibri_infer(self.handle))?;
            check(colibri_sample(self.handle, 0, ptr::null(), &mut token))?;
        }
        Ok(token)
    }
}
