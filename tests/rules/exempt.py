"""What the oracle finds and no rule offers, each with the reason."""

# Kernels that trust the shapes they are given: a brute search would read and write outside of their memory.
UNTRIED = frozenset(
    f"aten::{name}"
    for name in (
        *("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward"),
        *("adaptive_max_pool3d_backward", "avg_pool2d_backward", "avg_pool3d_backward"),
        *("fractional_max_pool2d_backward", "fractional_max_pool3d_backward"),
        *("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "max_unpool2d", "max_unpool3d"),
        *("_embedding_bag", "_embedding_bag_backward", "_embedding_bag_per_sample_weights_backward"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
        *("segment_reduce", "_segment_reduce_backward", "linalg_ldl_solve", "lu_unpack"),
        *(
            "native_layer_norm_backward",
            "native_group_norm",
            "native_group_norm_backward",
            "native_batch_norm_backward",
        ),
    )
)

# Splits that are right for some arguments, and not offered.
SPLITS = {
    "aten::_cdist_backward": "with p = 0 the gradient is zero whatever is split",
    "aten::_chunk_cat": "not met in models: runs whole",
    "aten::_histogramdd_from_bin_cts": "the bins depend on all elements; right here by the recorded range alone",
    "aten::_pdist_backward": "pairs of all rows: nobody trains with it",
    "aten::_unsafe_masked_index": "made by decompositions that capture does not use",
    "aten::avg_pool2d": "windows that do not overlap the cut: true for some sizes only",
    "aten::avg_pool3d": "windows that do not overlap the cut: true for some sizes only",
    "aten::histogram.bins_tensor": "no gradient, and met in reports alone: runs whole",
    "aten::index_fill.int_Scalar": "the value filled in happens to be the smallest",
    "aten::resize_as": "reads memory, not elements",
    "aten::roll": "a roll by nothing",
}

# Linearity that would let a partial sum through, and is not offered.
LINEAR = {
    "aten::_chunk_cat": "not met in models: runs whole",
    "aten::_pdist_backward": "pairs of all rows: nobody trains with it",
    "aten::_to_copy": "a cast to a narrower dtype rounds every term",
    "aten::_unsafe_masked_index": "made by decompositions that capture does not use",
    "aten::_unsafe_masked_index_put_accumulate": "made by decompositions that capture does not use",
    "aten::add.Scalar": "an added number that is zero, or as good as",
    "aten::binary_cross_entropy_backward": "linear in the weight of elements, which is no partial sum",
    "aten::binary_cross_entropy_with_logits": "linear in the weight of elements, which is no partial sum",
    "aten::block_diag": "not met in models: runs whole",
    "aten::huber_loss_backward": "where no element is beyond delta",
    "aten::index_reduce": "sums in one of its modes only, and met in none of the models",
    "aten::masked_scatter": "elements move over the whole tensor: runs whole",
    "aten::masked_scatter_backward": "elements move over the whole tensor: runs whole",
    "aten::mse_loss_backward": "linear in the difference of two inputs, neither of which is a partial sum",
    "aten::nan_to_num": "a term that is infinite is changed, the sum would not be",
    **dict.fromkeys(
        (f"aten::{name}_backward" for name in ("native_batch_norm", "native_layer_norm", "native_group_norm")),
        "a partial gradient is reduced before, not once an output after; and linear in the weight beside it",
    ),
    "aten::_fused_rms_norm_backward": "a partial gradient is reduced before, not once an output after",
    "aten::nextafter": "linear but for the last bit",
    "aten::nll_loss2d_backward": "linear in class weights, which are no partial sums",
    "aten::nll_loss2d_forward": "its second output does not depend on the scores",
    "aten::nll_loss_backward": "linear in class weights, which are no partial sums",
    "aten::nll_loss_forward": "linear in class weights, which are no partial sums",
    "aten::prod.dim_int": "a product over one element",
    "aten::put": "elements move over the whole tensor: runs whole",
    "aten::resize_as": "reads memory, not elements",
    "aten::rrelu_with_noise_backward": "linear in the noise, which is no partial sum",
    "aten::scatter_reduce.two": "sums in one of its modes only; scatter_add is the form that models use",
}

# Rules of operations that the recorded calls do not meet.
UNRECORDED = {
    **dict.fromkeys(
        (
            *("aten::binomial", "aten::normal.float_Tensor", "aten::normal.float_float", "aten::poisson"),
            *("aten::randint", "aten::randint.low", "aten::randint_like.low_dtype", "aten::randperm"),
        ),
        "draws are compared in tests/passes/test_random.py",
    ),
    **dict.fromkeys(
        ("aten::_native_batch_norm_legit", "aten::native_batch_norm", "aten::batch_norm_backward"),
        "forms that capture does not make: their rule is that of the recorded forms",
    ),
}
