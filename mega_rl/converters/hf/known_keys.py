"""Keys of config.json that every family knows, and those without effect on what the model computes."""

from __future__ import annotations

# Read by config.py and rope.py.
_READ = """
model_type num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size
vocab_size max_position_embeddings rms_norm_eps tie_word_embeddings hidden_act hidden_activation rope_parameters
rope_scaling rope_theta initializer_range eos_token_id pad_token_id dtype torch_dtype quantization_config auto_map
is_encoder_decoder partial_rotary_factor
"""

# Training, generation, tokenizer, outputs, bookkeeping of tools: nothing of it changes log-probs of the model in
# evaluation mode, or it is true of every decoder-only language model.
_HARMLESS = """
architectures transformers_version name_or_path tokenizer_class prefix bos_token_id sep_token_id unk_token_id
mask_token_id cls_token_id decoder_start_token_id image_token_id bos_token eos_token pad_token unk_token use_cache
cache_implementation attn_implementation use_flash_attn use_flash_attention use_sdpa flash_attn attention_dropout
hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout classifier_dropout summary_dropout residual_dropout
embedding_dropout ffn_dropout hidden_dropout_prob attention_probs_dropout_prob output_attentions
output_hidden_states return_dict return_dict_in_generate output_scores torchscript use_bfloat16 tf_legacy_loss
pruned_heads tie_encoder_decoder chunk_size_feed_forward is_decoder add_cross_attention cross_attention_hidden_size
finetuning_task id2label label2id num_labels problem_type task_specific_params do_sample temperature top_k top_p
min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
num_return_sequences num_beams num_beam_groups diversity_penalty early_stopping max_length min_length max_new_tokens
min_new_tokens forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
suppress_tokens begin_suppress_tokens generation_config router_aux_loss_coef output_router_logits
router_jitter_noise router_z_loss_coef aux_loss_alpha seq_aux gradient_checkpointing pretraining_tp ep_size
initializer_factor seq_length model_max_length max_seq_len max_sequence_length max_window_layers unsloth_version
unsloth_fixed unsloth_tokenized_full tokenizer_padding_side base_model_name_or_path neftune_noise_alpha
keys_to_ignore_at_inference trust_remote_code revision commit_hash attention_probs_dropout training_args license
model_name trained_with sft_config chat_template transformers.js_config
"""

READ, HARMLESS = frozenset(_READ.split()), frozenset(_HARMLESS.split())

# Keys of other families, with the values at which they change nothing.
OFF = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "use_sliding_window": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "rope_interleave": (False,),
    "use_mrope": (False,),
    "num_nextn_predict_layers": (0,),
}
