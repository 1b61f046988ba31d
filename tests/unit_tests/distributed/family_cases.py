"""The tiny models and layouts of test_family_parity.py, and what each rank finds out about them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from mega_rl.converters.families import FAMILIES
from mega_rl.converters.hf.config import release_problems
from mega_rl.converters.hf.rope import GROWTH
from tests.helpers.distributed import run_ranks
from tests.helpers.models import GROUPS, TINY, hf_logits, write_tiny_checkpoint
from tests.helpers.selection import FULL, covering, without

LENGTH, ROWS = 64, 2
LONG = 512  # for what acts on far positions
ODD = 51  # a vocabulary that tensor parallelism pads
DENSE_LAYOUTS = ("1", "tp2", "pp2", "pp2-vpp2", "pp1+3", "vpp0+2+1+1", "tp2-pp2")
EXPERT_LAYOUTS = ("ep2", "ep2-pp2", "ep2-tp2")
# name -> sizes; world_size 4 only for what needs it. sp is on wherever tp is 2, as training wants it for experts.
LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {"world_size": 1},
    "tp2": {"world_size": 2, "tp": 2},
    "pp2": {"world_size": 2, "pp": 2},
    "pp2-vpp2": {"world_size": 2, "pp": 2, "vpp": 2},
    "pp1+3": {"world_size": 2, "pp": 2, "pipeline": (1, 3)},
    "vpp0+2+1+1": {"world_size": 2, "pp": 2, "vpp": 2, "pipeline": (0, 2, 1, 1)},
    "ep2": {"world_size": 2, "ep": 2},
    "tp2-pp2": {"world_size": 4, "tp": 2, "pp": 2},
    "ep2-pp2": {"world_size": 4, "ep": 2, "pp": 2},
    "ep2-tp2": {"world_size": 4, "tp": 2, "ep": 2},
    "ep2-etp2": {"world_size": 4, "tp": 2, "ep": 2, "etp": 2},
}

LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHORT = {"low_freq_factor": 2.0, "high_freq_factor": 8.0, "original_max_position_embeddings": 128}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
GRANITE = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@dataclass(frozen=True)
class Case:
    """A tiny model.

    `unlike` is the case with the same weights whose logits must be far off, or the setting had no effect. `right_since`
    is the first release of transformers that computes the model right, empty if all have.
    """

    family: str
    overrides: dict[str, Any] = field(default_factory=dict)
    unlike: str = ""
    right_since: str = ""
    layouts: tuple[str, ...] = DENSE_LAYOUTS
    length: int = LENGTH
    mtp: str = "drop"
    dtype: str = "fp32"

    @property
    def reference(self) -> bool:
        """Whether the installed transformers computes the model right."""
        return not self.right_since or Version(version("transformers")) >= Version(self.right_since)

    @property
    def has_logits(self) -> bool:
        """Whether logits are compared: in float32, and Megatron-Core evaluates prediction layers only with labels."""
        return self.dtype == "fp32" and self.mtp == "drop"


def dense(family: str, *, unlike: str = "", tied: bool = False, **overrides: Any) -> Case:
    """A model without experts, on every layout that such a model can have."""
    return Case(family, {"tied": tied, **overrides}, unlike)


def experts(family: str, *, unlike: str = "", etp: bool = True, tied: bool = False, **overrides: Any) -> Case:
    """A model with experts."""
    layouts = DENSE_LAYOUTS + EXPERT_LAYOUTS + (("ep2-etp2",) if etp else ())
    return Case(family, {"tied": tied, **overrides}, unlike, layouts=layouts)


def rotary(*, unlike: str = "llama", **rope: Any) -> Case:
    """Llama under these rotary settings; large weights, so that attention looks at single tokens and far."""
    rope = {"rope_theta": 1e4, **rope}
    return dataclasses.replace(dense("llama", unlike=unlike, rope_parameters=rope, initializer_range=0.2), length=LONG)


def rounded(case: Case, layouts: tuple[str, ...]) -> Case:
    """The case in bf16: only the round trip is compared."""
    return dataclasses.replace(case, dtype="bf16", unlike="", layouts=layouts)


CASES: dict[str, Case] = {
    "qwen2": dense("qwen2", vocab_size=ODD),
    "qwen2-tied": dense("qwen2", tied=True),
    "qwen2-window": dense("qwen2", unlike="qwen2", vocab_size=ODD, use_sliding_window=True, sliding_window=8,
                          max_window_layers=2),
    "qwen3": dense("qwen3"),
    "qwen3-tied": dense("qwen3", tied=True, vocab_size=ODD),
    "qwen3-one-kv-head": dense("qwen3", num_key_value_heads=1),
    "llama": rotary(unlike="", rope_type="default"),
    "llama-llama3-8": rotary(**LLAMA3, factor=8.0),
    "llama-llama3-32": rotary(unlike="llama-llama3-8", **LLAMA3, factor=32.0),
    # Megatron-Core's own scaling knows one original length, 8192, whatever the config says.
    "llama-llama3-short": rotary(unlike="llama-llama3-8", **(LLAMA3 | SHORT), factor=8.0),
    "llama-linear": rotary(rope_type="linear", factor=4.0),
    "llama-yarn": rotary(**YARN),
    "llama-biases": dense("llama", attention_bias=True, mlp_bias=True, vocab_size=ODD),
    "llama-biases-one-kv-head": dense("llama", attention_bias=True, mlp_bias=True, num_key_value_heads=1),
    "mistral": dense("mistral"),
    "mistral-window": dense("mistral", unlike="mistral", sliding_window=8),
    "glm4": dense("glm4", vocab_size=ODD),
    "gemma3": dense("gemma3_text", tied=True, vocab_size=ODD),
    "gemma3-long": dense("gemma3_text", tied=True, unlike="gemma3", vocab_size=ODD, rope_parameters=GEMMA_ROPE),
    "mixtral": experts("mixtral"),
    "mixtral-window": experts("mixtral", unlike="mixtral", sliding_window=8),
    "qwen2_moe": experts("qwen2_moe", vocab_size=ODD),
    "qwen2_moe-normalised": experts("qwen2_moe", unlike="qwen2_moe", vocab_size=ODD, norm_topk_prob=True),
    "qwen3_moe": experts("qwen3_moe"),
    "qwen3_moe-as-they-are": experts("qwen3_moe", unlike="qwen3_moe", norm_topk_prob=False),
    "qwen3_moe-every-second": experts("qwen3_moe", tied=True, decoder_sparse_step=2, mlp_only_layers=[3]),
    "olmoe": experts("olmoe"),
    "deepseek_v2": experts("deepseek_v2"),
    "deepseek_v2-yarn": dataclasses.replace(
        experts("deepseek_v2", rope_parameters={**YARN, **MSCALE}), right_since="5.15.0"
    ),
    "deepseek_v3": experts("deepseek_v3", vocab_size=ODD),
    "deepseek_v3-no-groups": experts("deepseek_v3", unlike="deepseek_v3", vocab_size=ODD, n_group=1, topk_group=1),
    "deepseek_v3-yarn": experts("deepseek_v3", unlike="deepseek_v3", vocab_size=ODD,
                                rope_parameters={**YARN, **MSCALE}),
    "deepseek_v3-whole-queries": experts("deepseek_v3", q_lora_rank=None),
    "deepseek_v3-mtp-dropped": experts("deepseek_v3", mtp_layers=1),
    "deepseek_v3-mtp-loaded": dataclasses.replace(experts("deepseek_v3", mtp_layers=2), mtp="load"),
    "deepseek_v32": experts("deepseek_v32"),
    "deepseek_v32-yarn": experts("deepseek_v32", unlike="deepseek_v32", rope_parameters={**YARN, **MSCALE}),
    "deepseek_v32-whole": experts("deepseek_v32", unlike="deepseek_v32", index_topk=LENGTH),
    "glm_moe_dsa": dataclasses.replace(experts("glm_moe_dsa"), right_since="5.13.0"),
    "kimi_k2": experts("kimi_k2", rope_parameters={**YARN, **MSCALE}),
    "hy_v3": experts("hy_v3", vocab_size=ODD),
    "hy_v3-mtp-loaded": dataclasses.replace(experts("hy_v3", mtp_layers=2), mtp="load"),
    "ernie4_5_moe": experts("ernie4_5_moe", tied=True),
    "ernie4_5_moe-no-floor": experts("ernie4_5_moe", unlike="ernie4_5_moe", tied=True, moe_norm_min=1e-12),
    "minimax_m2": experts("minimax_m2"),
    "minimax_m2-whole-rotation": experts("minimax_m2", unlike="minimax_m2", rotary_dim=16, rope_parameters=ROPE),
    "dots1": experts("dots1"),
    "dots1-window": experts("dots1", unlike="dots1", sliding_window=8, max_window_layers=1),
    "glm4_moe": experts("glm4_moe"),
    "glm4_moe-groups": experts("glm4_moe", use_qk_norm=False, unlike="", **GROUPS),
    "gpt_oss": experts("gpt_oss", etp=False, vocab_size=ODD),
    # As many inputs as outputs: a matrix the wrong way round would fit.
    "gpt_oss-square": experts("gpt_oss", etp=False, intermediate_size=32),
    "gpt_oss-no-window": experts("gpt_oss", etp=False, unlike="gpt_oss", vocab_size=ODD,
                                 layer_types=["full_attention"] * 4),
    "olmo3": dense("olmo3", vocab_size=ODD),
    "olmo3-no-window": dense("olmo3", unlike="olmo3", vocab_size=ODD, layer_types=["full_attention"] * 4),
    "olmo3-yarn": dataclasses.replace(dense("olmo3", rope_parameters=YARN), right_since="5.13.0"),
    "exaone4": dense("exaone4"),
    "exaone4-rotated": dense("exaone4", unlike="exaone4", sliding_window=None, layer_types=["full_attention"] * 4),
    "smollm3": dense("smollm3"),
    "smollm3-rotated": dense("smollm3", unlike="smollm3", no_rope_layers=[1] * 4),
    "phi3": dense("phi3", vocab_size=ODD),
    "phi3-window": dense("phi3", unlike="phi3", vocab_size=ODD, sliding_window=8),
    "granite": dense("granite"),
    "apertus": dense("apertus", vocab_size=ODD),
    "mistral4": experts("mistral4"),
    "mistral4-not-grown": experts("mistral4", unlike="mistral4",
                                  rope_parameters=TINY["mistral4"]["rope_parameters"] | {GROWTH: 0.0}),
    "ministral3": dense("ministral3"),
    "ministral3-not-grown": dense("ministral3", unlike="ministral3",
                                  rope_parameters=TINY["ministral3"]["rope_parameters"] | {GROWTH: 0.0}),
    **{f"granite-{name}": dense("granite", unlike="granite", **{name: 1.0}) for name in GRANITE},
}  # fmt: skip
# A family without a case above has the one of its tiny checkpoint.
CASES |= {
    name: (experts if family.moe else dense)(name)
    for name, family in FAMILIES.items()
    if name not in {case.family for case in CASES.values()}
}
BF16_LAYOUTS = ("1", "tp2-pp2", "ep2-tp2")
CASES |= {
    f"{name}-bf16": rounded(CASES[name], BF16_LAYOUTS) for name in ("qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss")
} | {"gemma3-bf16": rounded(CASES["gemma3"], ("1", "tp2-pp2"))}

CASES = without(
    CASES, "llama-biases-one-kv-head", "qwen3-one-kv-head", "qwen3_moe-every-second", "glm4_moe-groups",
    "gpt_oss-square", "deepseek_v3-bf16", "glm4_moe-bf16", "gpt_oss-bf16", "deepseek_v3-mtp-dropped",
    "hy_v3-mtp-loaded", "minimax_m2-whole-rotation",
)  # fmt: skip
# In `make test` every case on one rank, the first of each family on one or two of its layouts, and every layout.
_FIRST = {case.family: name for name, case in reversed(CASES.items())}
_MANY = [
    (name, layout)
    for name, case in CASES.items()
    for layout in case.layouts
    if layout != "1" and (FULL or name in _FIRST.values())
]
_CHOSEN = covering(_MANY)
CASES = {
    name: dataclasses.replace(case, layouts=tuple(n for n in case.layouts if n == "1" or (name, n) in _CHOSEN))
    for name, case in CASES.items()
}


def write_case(name: str, root: Path) -> Path:
    """The checkpoint of a case."""
    case = CASES[name]
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    return write_tiny_checkpoint(root / name, family=case.family, dtype=dtype, **case.overrides)


def tokens_of(case: Case) -> Tensor:
    """[ROWS, length] int64 random tokens of its vocabulary, the last one among them."""
    vocab = case.overrides.get("vocab_size", 50)
    tokens = torch.randint(2, vocab, (ROWS, case.length), generator=torch.Generator().manual_seed(7))
    tokens[0, 3] = vocab - 1
    return tokens


def write_and_measure(root: Path, timeout_s: float) -> tuple[dict[str, Tensor], dict[str, list[dict[str, Any]]]]:
    """Write the checkpoints; return transformers' logits by case, and by "case layout" what every rank found."""
    paths = {name: write_case(name, root) for name in CASES}
    logits = {n: hf_logits(p, tokens_of(CASES[n])) for n, p in paths.items() if CASES[n].has_logits}
    right = {name: tensor for name, tensor in logits.items() if CASES[name].reference}
    wrong = {name: tensor for name, tensor in logits.items() if not CASES[name].reference}
    low = {n: (hf_logits(p, tokens_of(CASES[n])), hf_logits(p, tokens_of(CASES[n]), dtype=torch.bfloat16))
           for n, p in paths.items() if CASES[n].dtype == "bf16"}  # fmt: skip
    answers: dict[str, list[dict[str, Any]]] = {}
    for size in sorted({layout["world_size"] for layout in LAYOUTS.values()}):
        layouts = [name for name, layout in LAYOUTS.items() if layout["world_size"] == size]
        ranks = run_ranks(size, measure, str(root), right, wrong, low, layouts, timeout_s=timeout_s, device="cpu")
        answers |= {key: [rank[key] for rank in ranks] for key in ranks[0]}
    return logits, answers


def measure(
    rank: int,
    root: str,
    expected: dict[str, Tensor],
    wrong: dict[str, Tensor],
    low: dict[str, tuple[Tensor, Tensor]],
    layouts: list[str],
) -> dict[str, dict[str, Any]]:
    """What this rank finds for every case on every layout, by "case layout".

    `expected` are transformers' logits by case, `wrong` those that a known bug spoils, `low` those of bf16 weights in
    float32 and in bf16.
    """
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.parallel import groups
    from mega_rl.parallel.layout import ParallelLayout
    from tests.helpers.loaded_model import load_model

    actual = {}
    for layout in layouts:
        sizes = ParallelLayout(**LAYOUTS[layout], sequence_parallel=LAYOUTS[layout].get("tp", 1) > 1)
        built = groups.initialize(sizes, accelerator=accelerator, timeout_s=60)
        groups.seed_model_parallel(1, built)
        for name, case in CASES.items():
            if layout not in case.layouts or list(release_problems(case.family)):
                continue
            source = Path(root) / name
            model = load_model(source, groups=built, accelerator=accelerator, dtype=case.dtype, mtp=case.mtp)
            answer = round_trip(model, source)
            if name in expected:
                # Data-parallel ranks see the rows in another order: their experts' tokens must not be mixed up.
                shift = built.coordinates.dp_rank
                outputs = model.forward(tokens_of(case).roll(shift, 0))
                if outputs is not None:
                    off = outputs.cpu() - expected[name].roll(shift, 0)
                    answer["error"] = float(off.abs().max())
            elif layout == "1" and name in low:
                exact, theirs = low[name]
                answer["errors"] = [float((one - exact).norm()) for one in (model.forward(tokens_of(case)), theirs)]
            elif layout == "1" and not case.reference:
                answer |= against_wrong_reference(model, case, wrong[name])
            actual[f"{name} {layout}"] = answer
        groups.destroy()
    return actual


def against_wrong_reference(model: Any, case: Case, wrong: Tensor) -> dict[str, Any]:
    """Differences to logits of a known bug of transformers: as it should be, and with the same fault here.

    Its faults are a softmax scale without yarn's factor, halves in an indexer's rotation, and scaled angles in layers
    that have their own.
    """
    tokens = tokens_of(case)
    right = model.forward(tokens)
    config = model.chunks[0].config
    for layer in model.chunks[0].decoder.layers:
        attention = layer.self_attention
        if getattr(config, "dsa_indexer_topk", None):
            config.dsa_indexer_rope_interleaved = False
        elif hasattr(config, "qk_head_dim"):
            attention.core_attention.softmax_scale = (config.qk_head_dim + config.qk_pos_emb_head_dim) ** -0.5
        elif layer.rotary_pos_emb is not None:
            layer.rotary_pos_emb, attention.config = None, config
            kept = "_yarn_concentration_factor"  # by Megatron-Core from 0.19 on
            vars(attention)[kept] = vars(model.chunks[0].decoder.layers[-1].self_attention).get(kept)
    spoilt = model.forward(tokens)
    return {"right": float((right - wrong).abs().max()), "spoilt": float((spoilt - wrong).abs().max())}


def round_trip(model: Any, source: Path) -> dict[str, Any]:
    """Whether every exported tensor equals the source's; names that only one of both has, and those that differ."""
    from mega_rl.converters.live.export import BUCKET_BYTES, ModelPlace, export_hf
    from mega_rl.converters.plan.parameters import ignored_tensors
    from mega_rl.converters.safetensors.reader import CheckpointReader

    place = ModelPlace.of(model.sharding, model.groups, is_sharded=False, bucket_bytes=BUCKET_BYTES)
    exported = dict(export_hf(model.chunks, place))
    with CheckpointReader(source) as reader:
        aside = ignored_tensors(model.sharding.hf, head="lm")
        expected = {name: reader.read(name) for name in reader.tensors if name not in aside}
    return {
        "names": sorted(set(exported) ^ set(expected)),
        "different": [
            name
            for name, tensor in expected.items()
            if name in exported
            and (exported[name].dtype != tensor.dtype or not torch.equal(exported[name].cpu(), tensor))
        ],
        "count": len(exported),
    }
