"""Operations under the networks: normalisation, precision, memory layout and compiled kernels."""
