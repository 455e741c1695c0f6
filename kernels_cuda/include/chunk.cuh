// How many elements 16 bytes hold: the most that one instruction moves. Runs everywhere.
#pragma once
#include "scalar.cuh"

constexpr int CHUNK = 16 / sizeof(Scalar);
