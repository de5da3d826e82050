package main

// What the program needs of libcolibri: Go objects over colibri.h, errors instead of statuses.

/*
#cgo pkg-config: colibri
#cgo LDFLAGS: -lm
#include <stdlib.h>
#include <colibri.h>

// The header's initialisers are macros, which cgo cannot see.
static colibri_config_t config_init(void) { colibri_config_t c = COLIBRI_CONFIG_INIT; return c; }
static colibri_model_info_t info_init(void) { colibri_model_info_t i = COLIBRI_MODEL_INFO_INIT; return i; }
static colibri_stream_t stream_init(void) { colibri_stream_t s = COLIBRI_STREAM_INIT; return s; }
*/
import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"
)

// Error is a failed call: the library's sentence, and its status.
type Error struct {
	Status   int
	Sentence string
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s (%s)", e.Sentence, C.GoString(C.colibri_status_name(C.colibri_status_t(e.Status))))
}

// call runs one function of the library and, if it fails, fetches its sentence, which is the thread's: so both on one.
func call(function func() C.colibri_status_t) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	status := function()
	if status == C.COLIBRI_OK {
		return nil
	}
	return &Error{int(status), C.GoString(C.colibri_last_error())}
}

func tooSmall(err error) bool {
	var failed *Error
	return errors.As(err, &failed) && failed.Status == int(C.COLIBRI_ERR_BUFFER_TOO_SMALL)
}

// Model is an open file; any number of goroutines may use it.
type Model struct {
	handle *C.colibri_model_t
}

func OpenModel(path string) (*Model, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	model := &Model{}
	if err := call(func() C.colibri_status_t { return C.colibri_model_open(name, &model.handle) }); err != nil {
		return nil, err
	}
	return model, nil
}

func (m *Model) Close() { C.colibri_model_close(m.handle) }

// EndTokens are the ids at which a text ends.
func (m *Model) EndTokens() (map[int32]bool, error) {
	info := C.info_init()
	if err := call(func() C.colibri_status_t { return C.colibri_model_info(m.handle, &info) }); err != nil {
		return nil, err
	}
	ends := map[int32]bool{}
	for _, token := range info.eos_token[:info.num_eos] {
		ends[int32(token)] = true
	}
	return ends, nil
}

func (m *Model) Tokenize(text string) ([]int32, error) {
	bytes := C.CString(text)
	defer C.free(unsafe.Pointer(bytes))
	tokens := make([]int32, len(text)+8)
	for {
		var count C.size_t
		err := call(func() C.colibri_status_t {
			return C.colibri_tokenize(m.handle, bytes, C.size_t(len(text)), C.COLIBRI_TOKENIZE_ADD_SPECIAL,
				(*C.int32_t)(&tokens[0]), C.size_t(len(tokens)), &count)
		})
		if err == nil {
			return tokens[:count], nil
		}
		if !tooSmall(err) {
			return nil, err
		}
		tokens = make([]int32, count)
	}
}

// Stream takes tokens and gives whole characters.
type Stream struct {
	model *Model
	state C.colibri_stream_t
}

func (m *Model) Stream() *Stream { return &Stream{m, C.stream_init()} }

// Add gives the text of a token; token -1 ends the text: what still waits comes out.
func (s *Stream) Add(token int32) (string, error) {
	text := make([]byte, 64)
	for {
		var bytes C.size_t
		err := call(func() C.colibri_status_t {
			return C.colibri_stream_token(s.model.handle, &s.state, C.int32_t(token), (*C.char)(unsafe.Pointer(&text[0])),
				C.size_t(len(text)), &bytes)
		})
		if err == nil {
			return string(text[:bytes]), nil
		}
		if !tooSmall(err) {
			return "", err
		}
		text = make([]byte, bytes)
	}
}

// Session is one sequence, used by one goroutine at a time.
type Session struct {
	handle *C.colibri_t
}

func NewSession(model *Model) (*Session, error) {
	config := C.config_init()
	config.model = model.handle
	session := &Session{}
	err := call(func() C.colibri_status_t {
		if session.handle = C.colibri_init(&config); session.handle == nil {
			return C.colibri_last_status()
		}
		return C.COLIBRI_OK
	})
	if err != nil {
		return nil, err
	}
	return session, nil
}

func (s *Session) Close() { C.colibri_free(s.handle) }

// Next appends tokens and gives the most likely next one.
func (s *Session) Next(tokens []int32) (int32, error) {
	if len(tokens) == 0 {
		return 0, errors.New("no tokens to continue from")
	}
	length, token := C.int32_t(len(tokens)), C.int32_t(-1)
	err := call(func() C.colibri_status_t {
		status := C.colibri_set_input(s.handle, (*C.int32_t)(&tokens[0]), &length, 1)
		if status == C.COLIBRI_OK {
			status = C.colibri_infer(s.handle)
		}
		if status == C.COLIBRI_OK {
			status = C.colibri_sample(s.handle, 0, nil, &token)
		}
		return status
	})
	return int32(token), err
}
