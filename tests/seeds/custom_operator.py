"""A library with one operator of its own, ``my.domain::Twice``, built by the C compiler of this machine.

The functions of ONNX Runtime's C interface are reached by their place in its table, which never changes, so that no
header is needed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = r"""
#include <stddef.h>
#include <stdint.h>
typedef void* P;
typedef struct { const P* (*api)(uint32_t); const char* (*version)(void); } Base;
typedef struct Op {
  uint32_t version;
  P (*create)(const struct Op*, const P*, P);
  const char* (*name)(const struct Op*);
  const char* (*provider)(const struct Op*);
  int (*input_type)(const struct Op*, size_t);
  size_t (*inputs)(const struct Op*);
  int (*output_type)(const struct Op*, size_t);
  size_t (*outputs)(const struct Op*);
  void (*compute)(P, P);
  void (*destroy)(P);
  int (*input_form)(const struct Op*, size_t);
  int (*output_form)(const struct Op*, size_t);
} Op;
static const P* api;
static P create(const Op* op, const P* a, P info) { return (P)op; }
static const char* name(const Op* op) { return "Twice"; }
static const char* provider(const Op* op) { return 0; }
static int type(const Op* op, size_t i) { return 1; }
static size_t one(const Op* op) { return 1; }
static int required(const Op* op, size_t i) { return 0; }
static void destroy(P kernel) {}
static void compute(P kernel, P context) {
  P x, y, info;
  size_t rank, count;
  int64_t dims[8];
  float *from, *to;
  ((P(*)(P, size_t, P*))api[90])(context, 0, &x);
  ((P(*)(P, P*))api[65])(x, &info);
  ((P(*)(P, size_t*))api[61])(info, &rank);
  ((P(*)(P, int64_t*, size_t))api[62])(info, dims, rank);
  ((P(*)(P, size_t*))api[64])(info, &count);
  ((P(*)(P, size_t, const int64_t*, size_t, P*))api[91])(context, 0, dims, rank, &y);
  ((P(*)(P, P*))api[51])(x, (P*)&from);
  ((P(*)(P, P*))api[51])(y, (P*)&to);
  for (size_t i = 0; i < count; ++i) to[i] = 2 * from[i];
  ((void (*)(P))api[99])(info);
}
static Op twice = {8, create, name, provider, type, one, type, one, compute, destroy, required, required};
#ifdef _WIN32
__declspec(dllexport)
#endif
P RegisterCustomOps(P options, const Base* base) {
  P domain, status;
  api = base->api(8);
  if ((status = ((P(*)(const char*, P*))api[26])("my.domain", &domain))) return status;
  if ((status = ((P(*)(P, const Op*))api[27])(domain, &twice))) return status;
  return ((P(*)(P, P))api[28])(options, domain);
}
"""


def library(folder: Path) -> Path:
    """The library, built in ``folder``; the test is skipped where there is no compiler."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("no C compiler")
    source, made = folder / "twice.c", folder / f"twice.{'dylib' if sys.platform == 'darwin' else 'so'}"
    source.write_text(SOURCE, encoding="utf-8")
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", "-o", str(made), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the C compiler does not build a library: {done.stderr[:200]}")
    return made
