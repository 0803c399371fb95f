// act_mul: the MLP's activation times its gate.
#include "cpu/small.h"

EXL3_TIER_BEGIN

template <class T, class F>
static void apply(const exl3_act_mul_args& a, void* stream, F f) {
  for_rows(stream, a.rows, (int64_t)a.rows * a.n * 4, [&](int64_t r) {
    const T* g = (const T*)a.gate + r * a.gate_stride;
    const T* u = a.up ? (const T*)a.up + r * a.up_stride : nullptr;
    T* y = (T*)a.y + r * a.y_stride;
    if (u)
      for (int i = 0; i < a.n; i++) store(&y[i], f(load(g[i])) * load(u[i]));
    else
      for (int i = 0; i < a.n; i++) store(&y[i], f(load(g[i])));
  });
}

template <class T>
static int apply_kind(const exl3_act_mul_args& a, void* stream) {
  switch (a.activation) {
    case EXL3_ACT_SILU: apply<T>(a, stream, [](float x) { return x / (1.0f + exp_fast(-x)); }); return EXL3_OK;
    case EXL3_ACT_GELU: apply<T>(a, stream, [](float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678f)); }); return EXL3_OK;
    case EXL3_ACT_GELU_TANH:
      apply<T>(a, stream, [](float x) {  // x * sigmoid(2 u) = 0.5 x (1 + tanh u), without the cancellation
        const float u = 0.79788456f * (x + 0.044715f * x * x * x);
        return x / (1.0f + exp_fast(-2.0f * u));
      });
      return EXL3_OK;
    case EXL3_ACT_RELU: apply<T>(a, stream, [](float x) { return x < 0 ? 0.0f : x; }); return EXL3_OK;
    case EXL3_ACT_RELU2: apply<T>(a, stream, [](float x) { const float v = x < 0 ? 0.0f : x; return v * v; }); return EXL3_OK;
    case EXL3_ACT_XIELU: {
      const float p = a.params[0], n = a.params[1], b = a.params[2], e = a.params[3];
      apply<T>(a, stream, [=](float x) { return x > 0 ? p * x * x + b * x : (expm1f(x < e ? x : e) - x) * n + b * x; });
      return EXL3_OK;
    }
  }
  return fail(EXL3_BAD_ARGUMENT, "act_mul: unknown activation code %d", a.activation);
}

int act_mul(const exl3_act_mul_args* a, void* stream) {
  int status = EXL3_OK;
  const int outer = with_dtype(a->dtype, [&](auto* tag) { status = apply_kind<std::remove_pointer_t<decltype(tag)>>(*a, stream); });
  return outer ? outer : status;
}

EXL3_TIER_END
