// Functions of the C library that kernels call, of which two systems' libraries differ in the last bit: what is recorded and
// what repeats it both take these. Correctly rounded, but where a double's last bits decide.
extern "C" {
float expf(float x) { return (float)__builtin_exp(x); }
float logf(float x) { return (float)__builtin_log(x); }
float log1pf(float x) { return (float)__builtin_log1p(x); }
}
