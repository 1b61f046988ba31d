"""Order in which a run draws its prompts: a function of the seed and of how many were drawn before.

`epochs.PromptSampler` draws from one list, `curriculum.CurriculumSampler` its easiest prompts first,
`mixture.MixtureSampler` from several lists by their weights. Imports no torch.
"""
