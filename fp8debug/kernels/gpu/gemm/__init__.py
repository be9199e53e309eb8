"""The scaled GEMM, sampled references of its result, and the error between them."""
