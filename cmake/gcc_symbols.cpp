// nvcc's host code is compiled by g++; where zig links it (for an old glibc), g++'s C++ library is not there. This is what it asks of it:
// std::mutex::lock reports an error of the system, which for a valid mutex does not happen.
namespace std {
[[noreturn]] __attribute__((visibility("hidden"))) void __throw_system_error(int) { __builtin_trap(); }
}  // namespace std
