"""Where each row of the corpus of bugs was reported."""

from __future__ import annotations

from collections.abc import Mapping

REPORTS: Mapping[int, str] = {
    3: "vllm #22701", 5: "vllm #17091", 6: "FlagGems #1786", 9: "attorch #14", 11: "unsloth #10617",
    12: "unsloth #3782", 14: "flash-attention #355", 17: "flash-linear-attention #781",
    20: "flash-linear-attention #707", 24: "Triton-distributed #180", 25: "flash-linear-attention #1031",
    26: "Liger-Kernel #582", 28: "FlagGems 3dd5b0665", 30: "flash-linear-attention #1105",
    32: "flash-linear-attention a9dac8b1", 37: "pytorch #196678", 38: "Liger-Kernel #1375",
    39: "flash-linear-attention #1103", 41: "FlagGems #414", 44: "vllm #47056", 45: "vllm #47305",
    49: "flash-linear-attention 6cc3736b", 51: "flash-linear-attention #967", 55: "Liger-Kernel #251",
    58: "flash-linear-attention #692", 67: "SageAttention #386", 70: "flash-linear-attention #1077", 72: "apex #411",
    73: "xformers #785", 76: "FlagGems #4541", 78: "vllm-xpu-kernels #609", 81: "flash-attention #2562",
    83: "Liger-Kernel #1368", 86: "Liger-Kernel #950", 88: "flash-linear-attention #874",
    90: "flash-linear-attention #1095", 92: "torchrec #3730", 93: "mamba 3854ad8", 95: "Liger-Kernel #862",
    96: "flash-attention #443", 99: "vllm #42379", 100: "FlagGems #5009", 104: "tilelang #1243",
    105: "kernels-community #680", 107: "vllm #53339", 109: "triton #9022", 110: "FlagGems #790",
    112: "sglang #30079", 114: "mlc-llm #2694", 115: "pytorch #187353", 117: "pytorch #188541",
    118: "Liger-Kernel #968", 121: "flash-linear-attention #963", 122: "Liger-Kernel #370", 125: "triton #4004",
    126: "Liger-Kernel #930", 129: "LongLive #61", 130: "mamba ddce0c1", 132: "unsloth #8629",
    133: "flash-linear-attention #1071", 135: "mamba #574", 137: "flash-linear-attention f636f5a1",
    138: "flash-linear-attention #941", 140: "flash-linear-attention #1018", 147: "mamba #827", 148: "vllm #48391",
    150: "FlashMLA #212", 152: "vllm #50979", 153: "vllm #13632", 156: "flash-attention #2088",
    158: "FlagGems 89e093dd8", 160: "lion-pytorch #36",
    161: "flash-linear-attention ca89d201", 162: "FlagGems #3753", 165: "pytorch #164124",
    168: "flash-linear-attention #988", 172: "pytorch #132196", 174: "FastVideo #1647", 178: "Liger-Kernel #988",
    182: "sglang #35345", 183: "DeepSpeed #4442", 184: "SageAttention #372", 187: "transformers #39408",
    190: "FlagGems #2184", 191: "TransformerEngine #2476", 192: "Liger-Kernel #974", 195: "flashinfer #3774",
    196: "FlagGems #4988", 198: "unsloth #6888", 201: "vllm #41257", 206: "vllm #53203", 208: "FlagGems #5609",
    209: "unsloth #3061",
}  # fmt: skip
