// The table libexl3_cpu exports, and the choice of tier for the small operations.
#include "cpu/backend.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "cpu/isa.h"
#include "cpu/threads.h"
#include "exl3/attend.h"

namespace exl3 {
namespace cpu {

static thread_local char error_text[512];

int fail(int status, const char* format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(error_text, sizeof error_text, format, list);
  va_end(list);
  return status;
}

static const char* last_error() { return error_text; }

static const char* describe(int device) {
  if (device != 0) {
    fail(EXL3_BAD_ARGUMENT, "there is one CPU device, number 0");
    return nullptr;
  }
  static thread_local char text[128];
  snprintf(text, sizeof text, "%s, %s", isa_name(isa()), openmp().parallel ? "threads of torch's OpenMP pool" : "one thread (no OpenMP pool found)");
  return text;
}

#if defined(EXL3_HAVE_AVX2)
#define EXL3_PICK(name) (isa() >= Isa::avx2 ? avx2::name : base::name)
#else
#define EXL3_PICK(name) base::name
#endif

int attend(const exl3_attend_args* a, void* stream) {
  return attend_in_three(a, stream, EXL3_PICK(rotary), EXL3_PICK(cache_append), EXL3_PICK(attention));
}

static const exl3_backend* make_table() {
  static exl3_backend t;
  t.abi = EXL3_ABI;
  t.bytes = (int32_t)sizeof(exl3_backend);
  t.name = "cpu";
#if defined(__clang__)
  t.build = "exl3 " EXL3_VERSION ", clang " __clang_version__;
#elif defined(__GNUC__)
  t.build = "exl3 " EXL3_VERSION ", gcc " __VERSION__;
#else
  t.build = "exl3 " EXL3_VERSION;
#endif
  t.last_error = last_error;
  t.describe = describe;
  t.repack_bytes = repack_bytes;
  t.linear_workspace = linear_workspace;
  t.encode_workspace = encode_workspace;
  t.linear = linear;
  t.dense = dense;
  t.repack = repack;
  t.reconstruct = reconstruct;
  t.rotate = rotate;
  t.encode = encode;
  t.attend = attend;
#define EXL3_FILL(name) t.name = EXL3_PICK(name);
  EXL3_SMALL_OPS(EXL3_FILL)
#undef EXL3_FILL
  t.attention_workspace = EXL3_PICK(attention_workspace);
  t.sample_workspace = EXL3_PICK(sample_workspace);
  return &t;
}

}  // namespace cpu
}  // namespace exl3

EXL3_EXPORT const exl3_backend* exl3_get_backend(void) {
  static const exl3_backend* const table = exl3::cpu::make_table();
  return table;
}
