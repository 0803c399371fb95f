// What the host knows of a card, found once; its kernels by name; errors.
#pragma once
#include <stdint.h>

#include "exl3/ops.h"
#include "hip.h"

namespace exl3 {

struct Device {
  int index, multiprocessors, major, minor;
  bool matrix_products;  // WMMA: RDNA3 and newer
  char name[96];
  hip::Module module;
};

// Device `index`, or the current one where it is -1; null, with an error text, where it can't be used.
const Device* device(int index = -1);

// Sets this thread's error text and returns `status`.
int refuse(exl3_status status, const char* format, ...);
const char* last_error();

// Launches kernel `name` with one argument block. `slot` numbers the kernel: its function is looked up once a device.
int launch(int slot, const char* name, unsigned grid_x, unsigned grid_y, int threads, const void* block, void* stream);
constexpr int kSlots = 256;

}  // namespace exl3
