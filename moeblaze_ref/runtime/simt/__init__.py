"""The SIMT executor's C++ side: lets g++ compile a .cu file and the CPU run it."""
