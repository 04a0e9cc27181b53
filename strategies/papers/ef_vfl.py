"""EF-VFL: Communication-efficient Vertical Federated Learning via Compressed Error Feedback
(Valdeira, Xavier, Soares and Chi, 2025), and its baseline CVFL (Castiglia, Das, Wang and Patterson,
2022).

Algorithm 2, private labels: parties upload the compressed change of their embeddings, C(H - G)
(line 3). Both ends step their surrogate G by it (line 5). The label holder answers with gradient
rows at the surrogates (Eq. 5, line 4). Algorithm 1, shared labels (``labels = "shared"``): the
label holder forwards the uploads and the top model to all parties (line 4). Each party
differentiates the loss at the others' surrogates and its own exact embedding (Eq. 4).
``local-steps`` is Q of section 5.3.

A mini-batch's upload is compressed when the batch is used, C = C2 o C1 of section 5. So the first
upload of a row is C(H). A batch of all rows is the algorithm as printed. With
``initial-surrogates='embeddings'``, parties upload C(H(x_0)) of all rows before the first step, as
in the input of both algorithms.

CVFL compresses the embeddings themselves. The defaults keep labels private; the paper's experiments
do not. The paper's optimizer is plain SGD: ``optimizer = "sgd"``. EF-VFL's default is Adam, and
CVFL's SGD, since Adam follows the errors of directly compressed embeddings.

The algorithm on one page: ``strategies/reference/ef_vfl.py``.
"""

from vfl_flower.protocol.system import System

EF_VFL = System(
    name="ef-vfl",
    about="EF-VFL: compressed embeddings with error feedback (EF21).",
    defaults={"codec": "top-k", "compression": "error-feedback"},
)
CVFL = System(
    name="cvfl",
    about="CVFL: compressed embeddings, without error feedback.",
    defaults={"codec": "top-k"},
)
