"""The layouts in `contracts.json` are those that were measured on builds of the library.

The tables below were written down while 24 builds were measured, and hold what a header of
llama.cpp says: for each member its type, its default, and its offset in bytes in each layout.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from superfluid_adapter_llamacpp.contracts import CODES, Layout, contracts, served
from support.llama_libraries import BUILDS, INSTALLED, contract, library

MODEL: Final = """
member                      type  default   Md        Me      Mf
devices                     ptr   0          0         0       0
tensor_buft_overrides       ptr   0          8         8       8
n_gpu_layers                i32   -1        16=-1|999 16      16
split_mode                  i32   1         20        20      20
load_mode                   i32   -1         -        24=1    24
lazy_mode                   i32   1          -         -      28
main_gpu                    i32   0         24        28      32
tensor_split                ptr   0         32        32      40
progress_callback           ptr   0         40        40      48
progress_callback_user_data ptr   0         48        48      56
kv_overrides                ptr   0         56        56      64
vocab_only                  bool  0         64        64      72
use_mmap                    bool  1         65         -       -
use_direct_io               bool  0         66=0|1     -       -
use_mlock                   bool  0         67         -       -
check_tensors               bool  0         68        65      73
use_extra_bufts             bool  1         69        66      74
no_host                     bool  0         70        67      75
no_alloc                    bool  0         71        68      76
load_mtp                    bool  0          -        69      77
"""

CONTEXT: Final = """
member                type default   Ce   Cf   Cg   Ch   Ci   Cj
n_ctx                 u32  512        0    0    0    0    0    0
n_batch               u32  2048       4    4    4    4    4    4
n_ubatch              u32  512        8    8    8    8    8    8
n_seq_max             u32  1         12   12   12   12   12   12
n_rs_seq              u32  0          -   16   16   16   16   16
n_outputs_max         u32  0          -    -   20   20   20   20
n_outputs_max_per_seq u32  1          -    -    -    -   24   24
n_threads             i32  4         16   20   24   24   28   28
n_threads_batch       i32  4         20   24   28   28   32   32
ctx_type              i32  0          -   28   32   32   36   36
rope_scaling_type     i32  -1        24   32   36   36   40   40
pooling_type          i32  -1        28   36   40   40   44   44
attention_type        i32  -1        32   40   44   44   48   48
flash_attn_type       i32  -1        36   44   48   48   52   52
rope_freq_base        f32  0         40   48   52   52   56   56
rope_freq_scale       f32  0         44   52   56   56   60   60
yarn_ext_factor       f32  -1        48   56   60   60   64   64
yarn_attn_factor      f32  -1        52   60   64   64   68   68
yarn_beta_fast        f32  -1        56   64   68   68   72   72
yarn_beta_slow        f32  -1        60   68   72   72   76   76
yarn_orig_ctx         u32  0         64   72   76   76   80   80
defrag_thold          f32  -1        68   76   80   80   84   84
cb_eval               ptr  0         72   80   88   88   88   88
cb_eval_user_data     ptr  0         80   88   96   96   96   96
type_k                i32  1         88   96  104  104  104  104
type_v                i32  1         92  100  108  108  108  108
moe_cache_size        u64  0          -    -    -    -    -  112
abort_callback        ptr  0         96  104  112  112  112  120
abort_callback_data   ptr  0        104  112  120  120  120  128
embeddings            bool 0        112  120  128  128  128  136
offload_kqv           bool 1        113  121  129  129  129  137
no_perf               bool 1        114  122  130  130  130  138
op_offload            bool 1        115  123  131  131  131  139
swa_full              bool 1        116  124  132  132  132  140
kv_unified            bool 0        117  125  133  133  133  141
samplers              ptr  0        120  128  136  136  136  144
n_samplers            u64  0        128  136  144  144  144  152
ctx_other             ptr  0          -    -    -  152  152  160
"""

SIZES: Final = {
    "Md": (72, 72), "Me": (72, 70), "Mf": (80, 78),
    "Ce": (136, 136), "Cf": (144, 144), "Cg": (152, 152), "Ch": (160, 160), "Ci": (160, 160),
    "Cj": (168, 168),
}  # fmt: skip
"""Size of the struct, and the end of what a getter writes of it."""

PAIRS: Final = {
    1: ("Md", "Ce"), 2: ("Md", "Cf"), 3: ("Md", "Cg"), 4: ("Md", "Ch"), 5: ("Me", "Ch"),
    6: ("Me", "Ci"), 7: ("Mf", "Ci"), 8: ("Mf", "Cj"),
}  # fmt: skip

Member = tuple[str, str, int, set[float]]


def column(layout: str) -> list[Member]:
    """The members of a layout as its table has them: name, type, offset, defaults."""
    head, *rows = (MODEL if layout.startswith("M") else CONTEXT).strip().splitlines()
    at = {name: at for at, name in enumerate(head.split())}[layout]
    found: list[Member] = []
    for row in rows:
        words = row.split()
        if words[at] != "-":
            offset, _, own = words[at].partition("=")
            defaults = {float(one) for one in (own or words[2]).split("|")}
            found.append((words[0], words[1], int(offset), defaults))
    return found


LAYOUTS: Final = {
    layout.name: layout for one in contracts().values() for layout in (one.model, one.context)
}


@pytest.mark.parametrize("name", SIZES)
def test_every_member_is_where_it_was_measured(name: str) -> None:
    found = [
        (one.name, str(one.kind), one.offset, set(one.defaults))
        for one in LAYOUTS[name].fields.values()
    ]
    assert sorted(found) == sorted(column(name))
    assert (LAYOUTS[name].size, LAYOUTS[name].written) == SIZES[name]


def test_every_number_is_the_pair_that_it_was_given_to() -> None:
    assert {n: (one.model.name, one.context.name) for n, one in contracts().items()} == PAIRS
    assert {one.struct for n, one in LAYOUTS.items() if n.startswith("M")} == {"model"}
    assert {one.struct for n, one in LAYOUTS.items() if n.startswith("C")} == {"context"}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_members_lie_as_a_compiler_lays_them(layout: Layout) -> None:
    end = 0
    for one in sorted(layout.fields.values(), key=lambda one: one.offset):
        size = CODES[one.kind].size
        assert one.offset == -(-end // size) * size, one.name
        end = one.bytes.stop
    assert (layout.written, layout.size) == (end, -(-end // 8) * 8)


TYPES_OF_CACHE: Final = """
import ctypes, re, sys
from pathlib import Path
from superfluid_adapter_llamacpp.contracts import contracts
from superfluid_adapter_llamacpp.library import load
from superfluid_adapter_llamacpp.params import patched
from superfluid_adapter_llamacpp.symbols import LogCallback
from superfluid_adapter_llamacpp.tiny import tiny_model

path, number, model = sys.argv[1:]
Path(model).write_bytes(tiny_model())
contract, call, said = contracts()[int(number)], load(Path(path)).call, []
take = LogCallback(lambda level, text, data: said.append(text))
call.llama_log_set(ctypes.cast(take, ctypes.c_void_p), None)
loaded = call.llama_model_load_from_file(
    model.encode(), patched(call.llama_model_default_params, contract.model, {"n_gpu_layers": 0})
)
members = {"n_ctx": 256, "type_k": 0, "type_v": 1, "flash_attn_type": 0}
context = call.llama_init_from_model(
    loaded, patched(call.llama_context_default_params, contract.context, members)
)
print(*re.findall(r"[KV] [(]\\w+[)]", b"".join(said).decode()))
"""


@pytest.mark.parametrize(
    "build", [INSTALLED, *(name for name, one in BUILDS.items() if one.contract in served())]
)
def test_a_library_says_the_types_of_keys_and_values_as_they_were_set(
    build: str, tmp_path: Path
) -> None:
    words = [str(library(build)), str(contract(build)), str(tmp_path / "tiny.gguf")]
    done = subprocess.run(
        [sys.executable, "-c", TYPES_OF_CACHE, *words], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[0] == "K (f32) V (f16)"
