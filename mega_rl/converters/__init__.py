"""Conversion between Hugging Face tensors and engine parameters under any layout, from a table per family.

`families` holds the tables, `hf` reads config.json, `architecture` describes a model, `plan` lists the rectangles to
copy and proves them complete, `live` loads and exports models, `offline` converts checkpoints without one.
`safetensors` reads and writes the files. docs/lives.md follows one tensor. Must not import `engines`;
planning imports no torch.
"""
