//! Ready-made coefficients of the approximation, written by `src/weigh/data/fit.py`.

use super::approx::Coefficients;

/// Fitted to llama3.
pub(super) const LLAMA3: Coefficients = Coefficients([
    0.501, 0.156, 0.237, 1.432, 0.018, 0.599, 0.872, 0.663, 0.694, 0.189, 0.412, 1.113, 0.000, 0.596, 0.316, 0.237,
    0.610, 0.505,
]);

/// Fitted to qwen3.
pub(super) const QWEN: Coefficients = Coefficients([
    0.548, 0.141, 0.852, 1.115, 0.026, 0.487, 0.768, 0.680, 1.030, 0.189, 0.443, 1.040, 0.000, 0.329, 0.850, 0.298,
    0.770, 0.414,
]);

/// Fitted to gpt-oss.
pub(super) const GPT: Coefficients = Coefficients([
    0.574, 0.131, 0.213, 1.469, 0.023, 0.790, 0.864, 0.729, 0.475, 0.214, 0.378, 1.078, 0.000, 0.467, 0.360, 0.211,
    0.613, 0.329,
]);

/// Fitted to deepseek-v3.
pub(super) const DEEPSEEK: Coefficients = Coefficients([
    0.588, 0.131, 0.216, 1.278, 0.019, 0.584, 0.644, 0.679, 0.410, 0.232, 0.577, 1.231, 0.000, 1.448, 0.422, 0.084,
    0.363, 0.136,
]);

/// Fitted to mistral.
pub(super) const MISTRAL: Coefficients = Coefficients([
    0.307, 0.197, 0.809, 1.386, 0.017, 1.084, 1.101, 0.658, 0.601, 0.349, 0.170, 0.765, 0.000, 0.880, 0.270, 0.192,
    0.461, 0.243,
]);

/// Fitted to gemma3.
pub(super) const GEMMA: Coefficients = Coefficients([
    0.598, 0.110, 0.950, 0.549, 0.058, 0.763, 0.668, 0.380, 0.347, 0.114, 0.991, 1.291, 0.000, 0.236, 0.323, 0.217,
    0.591, 0.346,
]);

/// Fitted to all six families together.
pub(super) const GENERIC: Coefficients = Coefficients([
    0.532, 0.143, 0.376, 1.450, 0.025, 0.723, 0.807, 0.619, 0.579, 0.220, 0.464, 1.073, 0.000, 0.597, 0.415, 0.215,
    0.585, 0.346,
]);
