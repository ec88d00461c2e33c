//! zlib-rs under the name of `libz-ng-sys`: what flate2's `zlib-ng` feature calls, without cmake.
//!
//! The functions are those of `libz-rs-sys`. Only `z_stream` is declared again: flate2 fills in its allocators as plain
//! function pointers, where `libz-rs-sys` has `Option`s of them; both have the same layout, which is checked below.

#![allow(non_camel_case_types, non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]

use core::ffi::{c_char, c_int, c_uint, c_ulong, c_void};

pub use libz_rs_sys::{
    Z_BLOCK, Z_BUF_ERROR, Z_DATA_ERROR, Z_DEFAULT_STRATEGY, Z_DEFLATED, Z_FINISH, Z_FULL_FLUSH, Z_MEM_ERROR,
    Z_NEED_DICT, Z_NO_FLUSH, Z_OK, Z_PARTIAL_FLUSH, Z_STREAM_END, Z_STREAM_ERROR, Z_SYNC_FLUSH, zlibVersion,
};

pub type uInt = c_uint;
pub type uLong = c_ulong;
pub type Bytef = u8;
pub type voidpf = *mut c_void;
pub type alloc_func = unsafe extern "C" fn(voidpf, uInt, uInt) -> voidpf;
pub type free_func = unsafe extern "C" fn(voidpf, voidpf);

/// zlib's stream, with allocators that are always there.
#[repr(C)]
pub struct z_stream {
    pub next_in: *mut Bytef,
    pub avail_in: uInt,
    pub total_in: uLong,
    pub next_out: *mut Bytef,
    pub avail_out: uInt,
    pub total_out: uLong,
    pub msg: *mut c_char,
    pub state: *mut c_void,
    pub zalloc: alloc_func,
    pub zfree: free_func,
    pub opaque: voidpf,
    pub data_type: c_int,
    pub adler: uLong,
    pub reserved: uLong,
}

/// Passes a call on to `libz-rs-sys`; the stream has the same layout there.
macro_rules! pass_on {
    ($($name:ident($($argument:ident: $of:ty),*);)*) => {$(
        pub unsafe extern "C" fn $name(stream: *mut z_stream $(, $argument: $of)*) -> c_int {
            libz_rs_sys::$name(stream.cast() $(, $argument)*)
        }
    )*};
}

pass_on! {
    deflate(flush: c_int);
    deflateEnd();
    deflateReset();
    deflateParams(level: c_int, strategy: c_int);
    deflateSetDictionary(dictionary: *const Bytef, length: uInt);
    deflateInit2_(level: c_int, method: c_int, window_bits: c_int, memory_level: c_int, strategy: c_int,
                  version: *const c_char, stream_size: c_int);
    inflate(flush: c_int);
    inflateEnd();
    inflateReset2(window_bits: c_int);
    inflateSetDictionary(dictionary: *const Bytef, length: uInt);
    inflateInit2_(window_bits: c_int, version: *const c_char, stream_size: c_int);
}

const _: () = {
    use core::mem::{align_of, offset_of, size_of};
    type Theirs = libz_rs_sys::z_stream;
    assert!(size_of::<z_stream>() == size_of::<Theirs>() && align_of::<z_stream>() == align_of::<Theirs>());
    assert!(offset_of!(z_stream, next_out) == offset_of!(Theirs, next_out));
    assert!(offset_of!(z_stream, msg) == offset_of!(Theirs, msg));
    assert!(offset_of!(z_stream, zalloc) == offset_of!(Theirs, zalloc));
    assert!(offset_of!(z_stream, zfree) == offset_of!(Theirs, zfree));
    assert!(offset_of!(z_stream, opaque) == offset_of!(Theirs, opaque));
    assert!(offset_of!(z_stream, adler) == offset_of!(Theirs, adler));
};
