"""Reweighting rules against numbers of independent references, and what each method promises beyond `properties`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from strategies.rules.afl import AFL, project_to_simplex
from strategies.rules.ditto import Ditto
from strategies.rules.fedavg import FedAvg
from strategies.rules.fedfa import FedFa
from strategies.rules.fedheal import FedHEAL
from strategies.rules.fedpw import FedPW
from strategies.rules.propfair import PropFair
from strategies.rules.qfedavg import QFedAvg
from strategies.rules.rule import Rule
from strategies.rules.term import TERM
from strategies.rules.updates import ACCURACY_AFTER, ACCURACY_BEFORE, LOSS_BEFORE, TRAIN_LOSS, State, Updates
from tests.support import updates

CLOSE = {"rtol": 0.0, "atol": 1e-9}

CASES: dict[str, dict[str, Any]] = {
    "A": {
        "start": [0.5, -1, 0.25, 2],
        "rows": [[0.3, -0.2, 0.1, 0.4], [-0.25, 0.35, 0.05, 0.1], [0.1, 0.15, -0.45, -0.2]],
        "examples": [10, 30, 60],
        "losses": [0.9, 2.3, 1.4],
        "accuracies": [0.7, 0.25, 0.5],
        "participations": [5, 1, 3],
        "rate": 0.1,
    },
    "C": {
        "start": [0, 0],
        "rows": [[1, 0], [-0.6, 0.8]],
        "examples": [1, 3],
        "losses": [1, 2],
        "accuracies": [0.8, 0.4],
        "participations": [3, 1],
        "rate": 0.5,
    },
}
# fmt: off
FEDAVG = {"A": [0.485, -1.175, 0.495, 2.05], "C": [0.19999999999999998, -0.6000000000000001]}
QFEDAVG = (
{("A", 0.0): ([0.45, -1.1, 0.35, 1.9], 30.0),
 ("A", 0.1): ([0.46559641779626176, -1.0903497633060228, 0.333519170866905, 1.9203488541708322],
              37.369149640145764),
 ("A", 1.0): ([0.5133874239335484, -1.0677484787026106, 0.2844827586222844, 1.974847870180734], 123.25000000300001),
 ("A", 5.0): ([0.5375627529771936, -1.0567154815265003, 0.24790634843563686, 1.9863269910276407],
              4093.386475837664),
 ("C", 0.0): ([-0.2, -0.4], 4.0),
 ("C", 0.1): ([-0.15003921946065282, -0.3604188732562093], 4.757901617564917),
 ("C", 1.0): ([0.02857142856489795, -0.22857142857632654], 14.0000000004),
 ("C", 5.0): ([0.08965517241532188, -0.12610837438811912], 406.000000089)}
)
AFL_ROUNDS = (
{("A", 0.01): {"w1": [0.45, -1.1, 0.35, 1.9],
               "lam1": [0.32699999999999996, 0.34099999999999997, 0.33199999999999996],
               "w2": [0.40395000000000003, -1.20375, 0.44965, 1.8014999999999999],
               "lam2": [0.3206666666666667, 0.34866666666666674, 0.3306666666666667],
               "w_avg_after2": [0.426975, -1.151875, 0.399825, 1.85075],
               "w1_lambda_first": [0.45395, -1.10375, 0.34965, 1.9015]},
 ("A", 0.1): {"w1": [0.45, -1.1, 0.35, 1.9],
              "lam1": [0.27, 0.4099999999999999, 0.31999999999999995],
              "w2": [0.4395, -1.2375, 0.4465, 1.815],
              "lam2": [0.20666666666666672, 0.4866666666666666, 0.30666666666666664],
              "w_avg_after2": [0.44475, -1.1687500000000002, 0.39825, 1.8575],
              "w1_lambda_first": [0.4895, -1.1375, 0.34650000000000003, 1.915]},
 ("A", 1.0): {"w1": [0.45, -1.1, 0.35, 1.9],
              "lam1": [0.0, 0.9500000000000002, 0.050000000000000044],
              "w2": [0.6825, -1.44, 0.325, 1.815],
              "lam2": [0.0, 1.0, 0.0],
              "w_avg_after2": [0.56625, -1.27, 0.3375, 1.8575],
              "w1_lambda_first": [0.7324999999999999, -1.3399999999999999, 0.225, 1.915]},
 ("C", 0.01): {"w1": [-0.2, -0.4],
               "lam1": [0.495, 0.505],
               "w2": [-0.392, -0.804],
               "lam2": [0.49, 0.51],
               "w_avg_after2": [-0.29600000000000004, -0.6020000000000001],
               "w1_lambda_first": [-0.192, -0.404]},
 ("C", 0.1): {"w1": [-0.2, -0.4],
              "lam1": [0.45000000000000007, 0.55],
              "w2": [-0.32000000000000006, -0.8400000000000001],
              "lam2": [0.4, 0.6],
              "w_avg_after2": [-0.26, -0.6200000000000001],
              "w1_lambda_first": [-0.12000000000000005, -0.44000000000000006]},
 ("C", 1.0): {"w1": [-0.2, -0.4],
              "lam1": [0.0, 1.0],
              "w2": [0.39999999999999997, -1.2000000000000002],
              "lam2": [0.0, 1.0],
              "w_avg_after2": [0.09999999999999998, -0.8],
              "w1_lambda_first": [0.6, -0.8]}}
)
SIMPLEX = (
[([2.0, 0.6], [1.0, 0.0]), ([0.9, 0.6, -0.1], [0.65, 0.35, 0.0]), ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),
 ([0.5633333333333334, 0.47333333333333333, 0.42333333333333334], [0.41000000000000003, 0.32, 0.27]),
 ([5.0, 5.0, 5.0], [0.33333333333333304, 0.33333333333333304, 0.33333333333333304]), ([-1.0, -2.0], [1.0, 0.0])]
)
TERM_STEPS = (
{("A", 1e-08): {"weights_uniform_prior": [0.3333333312222222, 0.3333333358888889, 0.33333333288888894],
                "w_new": [0.4500000013166667, -1.10000000125, 0.34999999988333336, 1.9000000005],
                "weights_n_prior": [0.09999999928000002, 0.30000000204, 0.59999999868],
                "w_new_n": [0.485000000858, -1.1750000006599999, 0.49499999937600003, 2.04999999982]},
 ("A", 0.1): {"weights_uniform_prior": [0.3123492041260737, 0.35928710560013033, 0.328363690273796],
              "w_new": [0.4632806461348309, -1.1125351996759003, 0.34856438493059433, 1.9048043458443167],
              "weights_n_prior": [0.09295021013623517, 0.32075457395395424, 0.5862952159098105],
              "w_new_n": [0.49367405885663695, -1.1816183412431085, 0.48850009744809353, 2.048003501732073]},
 ("A", 1.0): {"weights_uniform_prior": [0.14916643029747662, 0.6048997031966656, 0.24593386650585777],
              "w_new": [0.5818816100593377, -1.2187716900352163, 0.31550861173805506, 1.9290302308625145],
              "weights_n_prior": [0.04336903214424957, 0.5276102931403394, 0.4290206747154111],
              "w_new_n": [0.5759897961702689, -1.2403428973775805, 0.4123418857504931, 2.0156954927713486]},
 ("A", 5.0): {"weights_uniform_prior": [0.0009010505464103378, 0.9881219066136572, 0.010977042839932505],
              "w_new": [0.745662457205498, -1.3473090136314878, 0.20544346889264573, 1.9030227976880567],
              "weights_n_prior": [0.00029726565192614356, 0.9779741122921848, 0.021728622055888946],
              "w_new_n": [0.7422314861718795, -1.3454907794802629, 0.21084944774534817, 1.906429406921189]},
 ("C", 1e-08): {"weights_uniform_prior": [0.4999999975, 0.5000000025],
                "w_new": [-0.19999999600000004, -0.400000002],
                "weights_n_prior": [0.249999998125, 0.750000001875],
                "w_new_n": [0.200000003, -0.6000000015000001]},
 ("C", 0.1): {"weights_uniform_prior": [0.47502081252106, 0.52497918747894],
              "w_new": [-0.16003330003369598, -0.419983349983152],
              "weights_n_prior": [0.23172217461772615, 0.7682778253822738],
              "w_new_n": [0.22924452061163814, -0.6146222603058191]},
 ("C", 1.0): {"weights_uniform_prior": [0.2689414213699951, 0.7310585786300049],
              "w_new": [0.16969372580800782, -0.5848468629040039],
              "weights_n_prior": [0.10923177257303593, 0.890768227426964],
              "w_new_n": [0.42522916388314247, -0.7126145819415712]},
 ("C", 5.0): {"weights_uniform_prior": [0.006692850924284856, 0.9933071490757153],
              "w_new": [0.5892914385211443, -0.7946457192605723],
              "weights_n_prior": [0.00224094920071447, 0.9977590507992855],
              "w_new_n": [0.5964144812788568, -0.7982072406394285]}}
)
TERM_EMA = (
{"A": {"step_w1": [0.14916643029747664, 0.6048997031966656, 0.24593386650585775],
       "R1": 1.7040803258664043,
       "step_w2": [0.14893150701401503, 0.5250463349729166, 0.23357109725349434],
       "R2": 1.6156564745255615},
 "C": {"step_w1": [0.2689414213699951, 0.7310585786300048],
       "R1": 1.6201145069582776,
       "step_w2": [0.26423779101804085, 0.6499200928732132],
       "R2": 1.5377586771307281}}
)
FEDFA = (
{"A": {"weights": [0.40645440364860946, 0.2916673362622555, 0.30187826008913504],
       "alpha1": [0.20509101347703684, 0.4950585524228885, 0.2998504341000746],
       "beta1": [0.6078177938201821, 0.08827612010162249, 0.30390608607819547],
       "w1_heavyball": [0.4207926869620675, -1.0660744259754378, 0.33061640986213703, 1.8686271569321578],
       "w2_heavyball": [0.309902448708962, -1.1585786223410508, 0.44347938366912887, 1.6847051766371786],
       "w1_flgo": [0.42158476009244683, -1.0654136817156834, 0.32981024576351564, 1.869940885362836]},
 "C": {"weights": [0.548862039759662, 0.45113796024033787],
       "alpha1": [0.2695770989403609, 0.7304229010596389],
       "beta1": [0.8281469805789631, 0.1718530194210368],
       "w1_heavyball": [-0.27817926361545925, -0.3609103681922703],
       "w2_heavyball": [-0.6676302326771022, -0.8661848836614487],
       "w1_flgo": [-0.2642703004346863, -0.3428648497826568]}}
)
FEDHEAL_START = [0.1, -0.2, 1.0, 0.5, -0.5]
FEDHEAL_ROWS = (
[[[0.05, 0.22, 0.1, 0.04, -0.08], [0.15, -0.06, 0.39, 0.46, -0.12], [0.29, 0.03, 0.07, 0.43, -0.43]],
 [[-0.41, -0.48, 0.33, 0.28, 0.37], [0.48, 0.3, -0.04, 0.28, -0.38], [0.14, -0.36, 0.44, 0.02, -0.09]],
 [[-0.24, 0.27, -0.04, 0.07, -0.48], [0.12, 0.11, 0.12, 0.44, 0.18], [-0.14, -0.06, 0.2, -0.44, 0.17]],
 [[0.17, -0.29, -0.37, -0.18, -0.14], [0.07, -0.06, 0.49, -0.4, -0.29], [-0.34, 0.15, -0.25, -0.03, -0.26]]]
)
FEDHEAL_PARTIAL = [(0, 1), (1, 2), (0, 2), (0, 1)]
FEDHEAL = (
{(0.3, False): [([-0.072204675995648, -0.25359611460006243, 0.8103542499105432, 0.17210419933634447,
                  -0.2784928626380049],
                 [0.28848620756017473, 0.3468473870707864, 0.364666405369039],
                 [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
                ([-0.38598812564743096, -0.25359611460006243, 0.4165899287927629, -0.0140542263018818,
                  -0.04026580264089588],
                 [0.261710673951888, 0.3773601938874437, 0.36092913216066835],
                 [[0, 0, 1, 1, 0], [1, 0, 0, 1, 1], [1, 0, 1, 1, 1]]),
                ([-0.35221957052298025, -0.35327515361142225, 0.2596020906371851, -0.2960143224239741,
                  0.43973419735910413],
                 [0.2861627686096976, 0.38379603158917447, 0.33004119980112806],
                 [[1, 1, 0, 1, 1], [1, 1, 1, 1, 0], [0, 1, 1, 0, 0]]),
                ([-0.3221143351159064, -0.29049009311854607, 0.1508431122576095, -0.26601432242397405,
                  0.6748409171214214],
                 [0.30237345480988725, 0.3797178113167895, 0.3179087338733233],
                 [[1, 1, 1, 0, 1], [1, 1, 1, 0, 1], [1, 1, 0, 1, 1]])],
 (0.5, False): [([-0.072204675995648, -0.25359611460006243, 0.8103542499105432, 0.17210419933634447,
                  -0.2784928626380049],
                 [0.28848620756017473, 0.3468473870707864, 0.364666405369039],
                 [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
                ([-0.38598812564743096, -0.25359611460006243, 0.4165899287927629, -0.0140542263018818,
                  -0.04026580264089588],
                 [0.261710673951888, 0.3773601938874437, 0.36092913216066835],
                 [[0, 0, 1, 1, 0], [1, 0, 0, 1, 1], [1, 0, 1, 1, 1]]),
                ([-0.505988125647431, -0.25359611460006243, 0.2165899287927629, -0.3253360247772893,
                  -0.04026580264089588],
                 [0.22862257974059907, 0.4285521904325229, 0.342825229826878],
                 [[0, 0, 0, 1, 0], [1, 0, 0, 1, 0], [0, 0, 1, 0, 0]]),
                ([-0.5759881256474311, -0.25359611460006243, -0.2734100712072371, -0.3253360247772893,
                  0.20880685916675537],
                 [0.207490358632156, 0.465716828116998, 0.3267928132508461],
                 [[0, 0, 0, 0, 1], [1, 0, 1, 0, 1], [0, 0, 0, 0, 1]])],
 (0.3, True): [([-0.005238876453069349, -0.2653311459314059, 0.7398072582860988, 0.22799671889710876,
                 -0.39790444941877223],
                [0.4476112354693067, 0.5523887645306934], [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
               ([-0.35810994222153797, 0.0946688540685941, 0.29980725828609883, 0.04521296272122097,
                 -0.12633795214566662],
                [0.6260913699072607, 0.3739086300927393], [[1, 0, 0, 1, 1], [1, 1, 1, 1, 1]]),
               ([-0.35810994222153797, -0.01887993638846258, 0.09980725828609882, -0.02478703727877904,
                 0.35366204785433336],
                [0.5259054256274444, 0.47409457437255553], [[0, 1, 0, 1, 1], [0, 1, 1, 0, 0]]),
               ([-0.47505215208390356, 0.041120063611537416, 0.013510263102442771, -0.02478703727877904,
                 0.5732487330607849],
                [0.4694220986236558, 0.5305779013763443], [[1, 0, 1, 0, 1], [1, 1, 1, 0, 1]])]}
)
FEDPW_START = (
[-0.17, 0.44, -1.0, -0.4, -0.71, -0.82, -0.63, -0.31, -0.21, 0.08, -0.16, 0.37, -0.59, 0.76, -0.95, 0.34, -0.17,
 0.12, -0.72, -0.6]
)
FEDPW_ROWS = (
[[[0.301, 0.468, -0.187, 0.192, 0.376, 0.395, -0.415, -0.461, -0.33, 0.378, -0.402, -0.079, 0.458, 0.033, 0.192,
   -0.184, 0.187, 0.335, -0.482, 0.25],
  [0.489, 0.248, -0.22, 0.289, -0.397, -0.052, 0.409, -0.206, -0.212, -0.37, -0.481, 0.179, -0.288, -0.234, -0.008,
   -0.447, 0.074, -0.353, 0.089, 0.2],
  [-0.398, -0.086, 0.194, -0.086, -0.45, 0.036, 0.164, 0.015, 0.445, 0.087, 0.403, -0.363, -0.361, 0.307, -0.102,
   -0.335, 0.428, -0.152, 0.251, 0.226]],
 [[0.383, 0.124, 0.251, -0.151, -0.23, 0.396, -0.072, 0.465, 0.163, 0.122, -0.385, 0.449, -0.05, 0.078, -0.092,
   -0.263, 0.403, 0.074, -0.497, 0.117],
  [-0.173, 0.027, 0.386, -0.143, 0.409, 0.123, -0.484, 0.429, 0.191, 0.497, -0.328, -0.363, 0.433, 0.197, -0.434,
   0.255, 0.254, 0.423, 0.212, -0.376],
  [-0.48, -0.474, -0.472, -0.254, 0.36, 0.039, 0.053, 0.342, -0.376, -0.221, 0.086, 0.47, 0.061, -0.481, 0.301,
   -0.267, 0.307, -0.112, 0.364, 0.247]],
 [[0.056, -0.364, -0.44, -0.379, -0.455, -0.393, -0.274, 0.213, 0.06, -0.487, -0.428, 0.467, 0.068, -0.297, -0.248,
   0.244, -0.305, 0.081, 0.47, 0.347],
  [-0.26, -0.006, 0.12, 0.329, -0.343, -0.481, -0.43, -0.014, 0.106, 0.069, -0.183, 0.489, 0.08, -0.12, 0.051,
   0.245, 0.169, -0.235, -0.434, -0.13],
  [0.13, -0.29, 0.253, -0.433, -0.24, 0.305, -0.307, 0.139, 0.025, 0.425, -0.237, -0.434, 0.235, 0.272, 0.408,
   0.432, -0.486, -0.266, 0.117, 0.449]]]
)
FEDPW_LOSSES = [[2.3, 1.9, 2.6], [1.7, 1.0, 2.4], [1.2, 0.6, 2.2]]
FEDPW = (
[{"w": [-0.38574262016270944, 0.1891764359726259, -0.8876369349418207, -0.567105075019903, -0.5817842892047143,
        -0.9508382759912628, -0.6828323607452031, -0.06234747723898576, -0.1068764299917823, 0.07248766214350547,
        0.08806315500055892, 0.41000654575784573, -0.5563480329169895, 0.7719524728908898, -0.9929957222835621,
        0.665511516699876, -0.36686051976654754, 0.1764404369539318, -0.6388342988663753, -0.8241841025526119],
  "weights": [0.36355499185031664, 0.40543143276137333, 0.23101357538831],
  "beta_loss": 0.3,
  "beta_dot": 0.3,
  "ratio": 0.2668842277328221,
  "drop": [0.2907782864617397, 0.3519947678221059, 0.25722694571615434],
  "scale": []},
 {"w": [-0.38961896296087495, 0.31822169011417545, -0.9926206588817452, -0.4314560443953555, -0.7529514868805374,
        -1.0899605009078805, -0.5006383635009075, -0.5263094309016274, -0.06177637448336238, -0.05443330639757257,
        0.3492761514872613, 0.2609536603804865, -0.7936650011342417, 0.8755005961501097, -0.8792485528424341,
        0.7346077570694738, -0.6946885856815979, 0.04770061192441932, -0.563326923485843, -0.7909943587097448],
  "weights": [0.35131874978943856, 0.3764338786039165, 0.2722473716066447],
  "beta_loss": 0.22500000000000006,
  "beta_dot": 0.4046501580619372,
  "ratio": 0.3540999516985596,
  "drop": [0.26405867970660146, 0.44889975550122246, 0.18704156479217604],
  "scale": [1.110057864350804, 1.4559692159019288]},
 {"w": [-0.3538917394643136, 0.564350196418127, -0.9226470054736835, -0.2514630446047089, -0.37622785901383576,
        -0.9066156786672326, -0.139787899485998, -0.5734392446044791, -0.06177637448336238, -0.026140912122544574,
        0.5811429649026537, 0.09269702068451027, -0.8733449019987752, 0.8884111187324134, -0.9297962857508957,
        0.3478902256091495, -0.47380961320810483, 0.21002334241214837, -0.5964896535209415, -1.1363148385702448],
  "weights": [0.3539924900350243, 0.30694410203079014, 0.3390634079341855],
  "beta_loss": 0.17647058823529413,
  "beta_dot": 0.4931615734733069,
  "ratio": 0.5339334754601816,
  "drop": [0.25384615384615383, 0.5076923076923077, 0.13846153846153844],
  "scale": [1.083399567000713, 1.2553690823733286]}]
)
# fmt: on


def told(given: Updates, **metrics: Any) -> Updates:
    """Updates with metrics: keyword ``loss_before`` is metric ``loss-before``."""
    values = {name.replace("_", "-"): np.asarray(value, dtype=float) for name, value in metrics.items()}
    return replace(given, metrics=values)


def case(name: str, server_round: int = 1, loss_factor: float = 1.0) -> Updates:
    parts = CASES[name]
    given = updates(np.asarray(parts["rows"], dtype=float), parts["examples"], server_round, parts["rate"])
    losses = loss_factor * np.asarray(parts["losses"], dtype=float)
    return replace(
        given, metrics={LOSS_BEFORE: losses, ACCURACY_AFTER: np.array(parts["accuracies"]), TRAIN_LOSS: losses}
    )


def start(name: str) -> np.ndarray:
    return np.asarray(CASES[name]["start"], dtype=float)


def weights(rule: Rule, given: Updates, state: State | None = None) -> np.ndarray:
    aggregate, _ = rule.aggregate(given, state or {})
    assert tuple(aggregate.diagnostics["weights"]) == given.client_ids
    return np.array(list(aggregate.diagnostics["weights"].values()))


def some_rows(k: int = 4, n: int = 30, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((k, n))


def play(rule: Rule, rounds: list[Updates]) -> list[Any]:
    """All rounds in turn; fails if a rule changes the state it was given."""
    state: State = {}
    aggregates = []
    for given in rounds:
        kept = {key: np.copy(value) for key, value in state.items()}
        aggregate, new = rule.aggregate(given, state)
        assert set(kept) == set(state)
        assert all(np.array_equal(kept[key], state[key]) for key in kept)
        assert np.isfinite(aggregate.step).all()
        aggregates.append(aggregate)
        state = new
    return aggregates


# FedAvg


@pytest.mark.parametrize("name", FEDAVG)
@pytest.mark.parametrize("rule", [FedAvg(), PropFair(), Ditto()], ids=lambda rule: type(rule).__name__)
def test_fedavg_and_those_that_differ_on_the_client_side_only(name: str, rule: Rule) -> None:
    aggregate, state = rule.aggregate(case(name), {})
    np.testing.assert_allclose(start(name) - aggregate.step, FEDAVG[name], **CLOSE)
    assert state == {}
    assert not rule.individual_updates


def test_propfair_and_ditto_send_their_hyperparameters_to_the_clients() -> None:
    assert PropFair(3.0, 0.1, "huber").client_config() == {
        "loss-transform": "propfair",
        "utility-baseline": 3.0,
        "utility-margin": 0.1,
        "utility-fallback": "huber",
    }
    assert Ditto(0.5, 2).client_config() == {"personal-weight": 0.5, "personal-epochs": 2}
    assert Ditto().required() == ("personal-model",)


# q-FedAvg


@pytest.mark.parametrize(("name", "q"), QFEDAVG)
def test_qfedavg(name: str, q: float) -> None:
    aggregate, _ = QFedAvg(q).aggregate(case(name), {})
    expected, h_sum = QFEDAVG[name, q]
    np.testing.assert_allclose(start(name) - aggregate.step, expected, **CLOSE)
    powers = (case(name).metrics[LOSS_BEFORE] + 1e-10) ** q
    # shrinkage = L sum f^q / sum h
    assert aggregate.diagnostics["shrinkage"] == pytest.approx(powers.sum() / CASES[name]["rate"] / h_sum, rel=1e-9)


def test_qfedavg_with_q_0_is_the_plain_mean() -> None:
    rows = some_rows()
    given = told(updates(rows, [1, 2, 3, 4], rate=0.1), loss_before=[0, 1, 5, 1e300])
    np.testing.assert_allclose(QFedAvg(0.0).aggregate(given, {})[0].step, rows.mean(axis=0), **CLOSE)


@pytest.mark.parametrize("q", [0.1, 1.0, 5.0])
def test_qfedavg_with_equal_losses_shortens_the_plain_mean(q: float) -> None:
    rows, rate, loss = some_rows(), 0.1, 1.7
    step = QFedAvg(q).aggregate(told(updates(rows, rate=rate), loss_before=[loss] * 4), {})[0].step
    curvature = q * np.mean((rows / rate) ** 2 @ np.ones(30)) / loss
    np.testing.assert_allclose(step, rows.mean(axis=0) / rate / (1 / rate + curvature), rtol=1e-9)
    assert np.linalg.norm(step) <= np.linalg.norm(rows.mean(axis=0))


def test_qfedavg_with_large_q_follows_the_worst_off_client() -> None:
    given = told(updates(some_rows()), loss_before=[1, 1.2, 3, 2])
    np.testing.assert_allclose(weights(QFedAvg(200.0), given), [0, 0, 1, 0], atol=1e-9)


def test_qfedavg_survives_losses_of_zero_and_of_any_size() -> None:
    rows = np.array([[0.0, 0.0], [0.1, 0.2]])
    moved = QFedAvg(0.1).aggregate(told(updates(rows), loss_before=[0, 1]), {})[0].step
    assert np.linalg.norm(moved) > 0.01
    for losses in ([0, 0], [1e300, 1e-300], [1e308, 1e308]):
        for scale in (1e-150, 1.0, 1e150, 1e250):
            for q in (0.1, 5.0, 1000.0):
                step = QFedAvg(q).aggregate(told(updates(scale * some_rows(2)), loss_before=losses), {})[0].step
                assert np.isfinite(step).all()


# AFL


@pytest.mark.parametrize(("name", "gamma"), AFL_ROUNDS)
def test_afl(name: str, gamma: float) -> None:
    golden = AFL_ROUNDS[name, gamma]
    first, second = play(AFL(gamma), [case(name), case(name, 2)])
    w1 = start(name) - first.step
    w2 = w1 - second.step
    np.testing.assert_allclose(w1, golden["w1"], **CLOSE)
    np.testing.assert_allclose(w2, golden["w2"], **CLOSE)
    np.testing.assert_allclose(list(first.diagnostics["multipliers"].values()), golden["lam1"], **CLOSE)
    np.testing.assert_allclose(list(second.diagnostics["multipliers"].values()), golden["lam2"], **CLOSE)
    np.testing.assert_allclose(w1 + first.output_offset, (start(name) + w1) / 2, **CLOSE)
    # The reference's mean leaves out the initial model, which ours counts as one of three.
    without_start = (3 * (w2 + second.output_offset) - start(name)) / 2
    np.testing.assert_allclose(without_start, golden["w_avg_after2"], **CLOSE)
    lambda_first = AFL(gamma, "lambda-first").aggregate(case(name), {})[0].step
    np.testing.assert_allclose(start(name) - lambda_first, golden["w1_lambda_first"], **CLOSE)


@pytest.mark.parametrize(("point", "nearest"), SIMPLEX)
def test_simplex_projection(point: list[float], nearest: list[float]) -> None:
    np.testing.assert_allclose(project_to_simplex(np.array(point)), nearest, **CLOSE)


def test_simplex_projection_is_the_nearest_point() -> None:
    generator = np.random.default_rng(3)
    for size in (1, 2, 5, 40):
        for spread in (0.01, 1.0, 100.0):
            point = spread * generator.standard_normal(size)
            nearest = project_to_simplex(point)
            assert (nearest >= 0).all()
            assert nearest.sum() == pytest.approx(1, abs=1e-12)
            # <v - x, y - x> <= 0 at every vertex y.
            assert ((point - nearest) - (point - nearest) @ nearest <= 1e-12 * max(1, spread)).all()
    np.testing.assert_array_equal(project_to_simplex(np.array([1e300, -1e300, 5e299])), [1, 0, 0])


def test_afl_keeps_multipliers_by_client_over_the_whole_population() -> None:
    population = tuple(str(i) for i in range(5))
    rows = some_rows(5)
    generator = np.random.default_rng(1)
    rule, state = AFL(0.05), {}
    for server_round in range(1, 12):
        present = sorted(generator.choice(5, 3, replace=False).tolist())
        given = replace(
            updates(rows[present], server_round=server_round),
            client_ids=tuple(population[i] for i in present),
            population=population,
            metrics={LOSS_BEFORE: generator.random(3)},
        )
        before = np.array(state["afl-multipliers"]) if state else np.full(5, 0.2)
        aggregate, state = rule.aggregate(given, state)
        multipliers = state["afl-multipliers"]
        assert state["afl-clients"] == list(population)
        assert (multipliers >= 0).all()
        assert multipliers.sum() == pytest.approx(1, abs=1e-12)
        shares = list(aggregate.diagnostics["weights"].values())
        np.testing.assert_allclose(shares, before[present] / before[present].sum(), **CLOSE)


def test_afl_ignores_a_common_shift_of_all_losses() -> None:
    given = [told(updates(some_rows()), loss_before=[1, 2, 3, 4]), told(updates(some_rows()), loss_before=[0, 2, 1, 1])]
    shifted = [told(g, loss_before=g.metrics[LOSS_BEFORE] + 7) for g in given]
    for one, other in zip(play(AFL(0.1), given), play(AFL(0.1), shifted), strict=True):
        assert list(one.diagnostics["multipliers"].values()) == pytest.approx(
            list(other.diagnostics["multipliers"].values()), abs=1e-12
        )


def test_afl_without_ascent_stays_uniform() -> None:
    given = told(updates(some_rows(), [1, 2, 3, 4]), loss_before=[1, 2, 3, 4])
    for aggregate in play(AFL(0.0), [given] * 3):
        np.testing.assert_allclose(aggregate.step, some_rows().mean(axis=0), **CLOSE)


def test_afl_falls_back_to_equal_shares_where_no_participant_has_a_multiplier() -> None:
    first = told(updates(some_rows(3)), loss_before=[9, 0, 0])
    second = told(updates(some_rows(2), first=1, server_round=2), loss_before=[0, 0])
    aggregate = play(AFL(1.0), [first, second])[1]
    assert list(aggregate.diagnostics["weights"].values()) == [0.5, 0.5]
    assert aggregate.diagnostics["multipliers"] == {"0": 1.0, "1": 0.0, "2": 0.0}


def test_afl_gives_newcomers_an_equal_share() -> None:
    first = told(updates(some_rows(2)), loss_before=[1, 0])
    second = told(updates(some_rows(4), server_round=2), loss_before=[0] * 4)
    multipliers = play(AFL(0.1), [first, second])[1].diagnostics["multipliers"]
    np.testing.assert_allclose(list(multipliers.values()), [0.275, 0.225, 0.25, 0.25], **CLOSE)


def test_afl_slots_belong_to_places_in_the_list() -> None:
    first = told(updates(some_rows(2)), loss_before=[1, 0])
    second = told(updates(some_rows(2), first=7, server_round=2), loss_before=[0, 0])
    aggregate = play(AFL(0.1, multiplier_owner="slot"), [first, second])[1]
    assert aggregate.diagnostics["weights"] == pytest.approx({"7": 0.55, "8": 0.45})


def test_afl_last_keeps_no_average() -> None:
    aggregate, state = AFL(afl_output="last").aggregate(case("A"), {})
    assert aggregate.output_offset is None
    assert "afl-mean-offset" not in state


# TERM


@pytest.mark.parametrize(("name", "tilt"), TERM_STEPS)
@pytest.mark.parametrize(("prior", "suffix"), [("uniform", "uniform"), ("examples", "n")])
def test_term(name: str, tilt: float, prior: str, suffix: str) -> None:
    golden = TERM_STEPS[name, tilt]
    aggregate, _ = TERM(tilt, prior).aggregate(case(name), {})
    np.testing.assert_allclose(
        list(aggregate.diagnostics["weights"].values()), golden[f"weights_{suffix}_prior"], **CLOSE
    )
    expected = golden["w_new" if prior == "uniform" else "w_new_n"]
    np.testing.assert_allclose(start(name) - aggregate.step, expected, **CLOSE)


@pytest.mark.parametrize("name", TERM_EMA)
def test_term_with_a_moving_normalizer(name: str) -> None:
    golden = TERM_EMA[name]
    given = [case(name), case(name, 2, loss_factor=0.9)]
    for i, aggregate in enumerate(play(TERM(1.0, "uniform", "ema"), given), start=1):
        np.testing.assert_allclose(list(aggregate.diagnostics["weights"].values()), golden[f"step_w{i}"], **CLOSE)
        assert aggregate.diagnostics["log-normalizer"] == pytest.approx(golden[f"R{i}"], abs=1e-9)


def test_term_runs_from_fedavg_to_the_worst_off_client() -> None:
    given = told(updates(some_rows(), [1, 2, 3, 4]), loss_before=[1, 2, 1.5, 0.3])
    np.testing.assert_array_equal(weights(TERM(0.0), given), given.weights)
    np.testing.assert_allclose(weights(TERM(1e-12), given), given.weights, atol=1e-11)
    np.testing.assert_allclose(weights(TERM(1e5), given), [0, 1, 0, 0], atol=1e-12)
    np.testing.assert_allclose(weights(TERM(-1e5), given), [0, 0, 0, 1], atol=1e-12)
    worst = [weights(TERM(tilt), given)[1] for tilt in (-2.0, 0.0, 0.1, 1.0, 10.0)]
    assert worst == sorted(worst)


@pytest.mark.parametrize("normalizer", ["round", "ema"])
def test_term_does_not_overflow(normalizer: str) -> None:
    for losses in ([0, 0], [1e300, 1], [1e300, 1e300]):
        for tilt in (-1e6, 1e6, 1.0):
            given = told(updates(some_rows(2)), loss_before=losses)
            play(TERM(tilt, "examples", normalizer), [given, told(given, loss_before=[0, 3]), given])


# FedFa


@pytest.mark.parametrize("name", FEDFA)
def test_fedfa(name: str) -> None:
    golden = FEDFA[name]
    state = {f"fedfa-participations/{i}": f - 1 for i, f in enumerate(CASES[name]["participations"])}
    np.testing.assert_allclose(weights(FedFa(), case(name), state), golden["weights"], **CLOSE)
    np.testing.assert_allclose(weights(FedFa(1.0), case(name), state), golden["alpha1"], **CLOSE)
    np.testing.assert_allclose(weights(FedFa(0.0), case(name), state), golden["beta1"], **CLOSE)
    aggregate, memory = FedFa().aggregate(case(name), state)
    w1 = start(name) - aggregate.step
    np.testing.assert_allclose(w1, golden["w1_heavyball"], **CLOSE)
    # The reference's second round: half the displacements, and the same participations.
    half = replace(case(name, 2), rows=tuple(row / 2 for row in case(name).rows))
    second, _ = FedFa().aggregate(half, {**memory, **state})
    np.testing.assert_allclose(w1 - second.step, golden["w2_heavyball"], **CLOSE)
    damped, _ = FedFa(momentum_form="damped").aggregate(case(name), state)
    np.testing.assert_allclose(start(name) - damped.step, golden["w1_flgo"], **CLOSE)


def test_fedfa_asks_for_one_accuracy() -> None:
    assert FedFa().required() == (ACCURACY_AFTER,)
    assert FedFa(accuracy_time="before").required() == (ACCURACY_BEFORE,)
    given = told(updates(some_rows(2)), accuracy_before=[0.9, 0.1], accuracy_after=[0.1, 0.9])
    assert weights(FedFa(accuracy_time="before"), given)[1] > 0.5 > weights(FedFa(), given)[1]


def test_fedfa_serves_the_inaccurate_and_the_frequent() -> None:
    given = told(updates(some_rows()), accuracy_after=[0.9, 0.2, 0.5, 0.7])
    by_accuracy = weights(FedFa(1.0), given)
    assert np.argsort(by_accuracy).tolist() == [0, 3, 2, 1]
    percent = told(given, accuracy_after=[90, 20, 50, 70])
    np.testing.assert_allclose(weights(FedFa(), percent), weights(FedFa(), given), rtol=1e-12)
    frequent = {"fedfa-participations/2": 6, "fedfa-participations/0": 2}
    assert np.argsort(weights(FedFa(0.0), given, frequent))[-2:].tolist() == [0, 2]


def test_fedfa_without_momentum_is_its_weighted_mean_every_round() -> None:
    given = told(updates(some_rows()), accuracy_after=[0.9, 0.2, 0.5, 0.7])
    for aggregate in play(FedFa(server_momentum=0.0), [given, replace(given, round=2)]):
        shares = np.array(list(aggregate.diagnostics["weights"].values()))
        np.testing.assert_allclose(aggregate.step, shares @ some_rows(), **CLOSE)


@pytest.mark.parametrize("accuracies", [[0, 0, 0], [1, 0, 0], [0.4, 0.4, 0.4], [0, 0.5, 0.5]])
def test_fedfa_weights_are_shares_whatever_the_accuracies(accuracies: list[float]) -> None:
    shares = weights(FedFa(), told(updates(some_rows(3)), accuracy_after=accuracies))
    assert shares.sum() == pytest.approx(1, abs=1e-12)
    assert (shares >= 0).all()
    if len(set(accuracies)) == 1:
        np.testing.assert_allclose(shares, [1 / 3] * 3, rtol=1e-12)
    assert weights(FedFa(), told(updates(some_rows(1)), accuracy_after=accuracies[:1])) == [1.0]


# FedHEAL


def healing(rows: Any, present: tuple[int, ...], server_round: int) -> Updates:
    matrix = np.asarray(rows, dtype=float)
    return replace(
        updates(matrix[list(present)], server_round=server_round),
        client_ids=tuple(str(i) for i in present),
        arrays=(slice(0, 2), slice(2, matrix.shape[1])),
    )


@pytest.mark.parametrize(("tau", "partial"), FEDHEAL)
def test_fedheal(tau: float, partial: bool) -> None:
    w = np.array(FEDHEAL_START)
    presence = FEDHEAL_PARTIAL if partial else [(0, 1, 2)] * 4
    rounds = [healing(rows, p, t) for t, (rows, p) in enumerate(zip(FEDHEAL_ROWS, presence, strict=True), start=1)]
    for aggregate, (expected, shares, masks) in zip(play(FedHEAL(tau), rounds), FEDHEAL[tau, partial], strict=True):
        w = w - aggregate.step
        np.testing.assert_allclose(w, expected, **CLOSE)
        np.testing.assert_allclose(list(aggregate.diagnostics["weights"].values()), shares, **CLOSE)
        kept = list(aggregate.diagnostics["kept-shares"].values())
        np.testing.assert_allclose(kept, np.mean(masks, axis=1), **CLOSE)


def flipping_rounds(count: int = 5, k: int = 3, n: int = 200) -> list[Updates]:
    return [healing(some_rows(k, n, seed=t), tuple(range(k)), t) for t in range(1, count + 1)]


def test_fedheal_below_every_agreement_masks_nothing() -> None:
    for given, aggregate in zip(flipping_rounds(), play(FedHEAL(-0.1), flipping_rounds()), strict=True):
        shares = np.array(list(aggregate.diagnostics["weights"].values()))
        np.testing.assert_allclose(aggregate.step, shares @ np.array(given.rows), **CLOSE)


def test_fedheal_above_every_agreement_freezes_after_the_first_round() -> None:
    first, *later = play(FedHEAL(1.0), flipping_rounds())
    assert first.step.all()
    assert not any(aggregate.step.any() for aggregate in later)


def test_fedheal_without_distances_keeps_weights_equal() -> None:
    for aggregate in play(FedHEAL(distance_momentum=0.0), flipping_rounds()):
        assert list(aggregate.diagnostics["weights"].values()) == pytest.approx([1 / 3] * 3, abs=1e-12)


def test_fedheal_never_masks_a_client_that_keeps_its_signs() -> None:
    rows = some_rows(2, 40)
    rows[0, :5] = 0.0
    steady = [healing(np.vstack([rows[0], s * rows[1]]), (0, 1), t) for t, s in enumerate([1, -1, -1, 1, -1], 1)]
    for aggregate in play(FedHEAL(0.99), steady):
        assert aggregate.diagnostics["kept-shares"]["0"] == 1.0
        assert sum(aggregate.diagnostics["weights"].values()) == pytest.approx(1, abs=1e-12)


def test_fedheal_moves_a_coordinate_by_the_mean_over_those_left() -> None:
    first = healing([[1, 1, 1], [1, 1, 1]], (0, 1), 1)
    second = healing([[1, -1, -1], [3, 3, -1]], (0, 1), 2)
    aggregate = play(FedHEAL(distance_momentum=0.0), [first, second])[1]
    np.testing.assert_allclose(aggregate.step, [2, 3, 0], **CLOSE)


def test_fedheal_agreement_must_exceed_the_threshold_exactly() -> None:
    # 7 of 10 earlier signs were positive, so a negative one agrees with exactly 0.3 of them.
    signs = [1] * 7 + [-1] * 3 + [-1]
    rounds = [healing([[s, s, s]], (0,), t) for t, s in enumerate(signs, 1)]
    assert not play(FedHEAL(0.3), rounds)[-1].step.any()
    assert play(FedHEAL(0.29), rounds)[-1].step.all()


def test_fedheal_newcomers() -> None:
    rounds = [healing(some_rows(3), p, t) for t, p in enumerate([(0, 1), (0, 1), (0, 1), (1, 2)], 1)]
    light, mean = (play(FedHEAL(newcomer_weight=n), rounds)[-1].diagnostics["weights"]["2"] for n in ("light", "mean"))
    assert light < mean < 0.6


def test_fedheal_counts_are_small_and_go_on_beyond_16_bits() -> None:
    given = healing([[1, -1, 0]], (0,), 2)
    state = {"fedheal-rounds/0": 32767, "fedheal-signs/0": np.array([32767, 0, 32767], dtype=np.int16)}
    aggregate, after = FedHEAL().aggregate(given, state)
    np.testing.assert_array_equal(after["fedheal-signs/0"], [32768, 0, 32768])
    np.testing.assert_array_equal(aggregate.step, [1, -1, 0])
    assert FedHEAL().aggregate(given, {})[1]["fedheal-signs/0"].dtype == np.int16


@pytest.mark.parametrize("scale", [0.0, 1e-150, 1e150])
def test_fedheal_and_fedpw_take_rows_of_any_size(scale: float) -> None:
    for count in (1, 2):
        rounds = [
            replace(
                healing(scale * some_rows(2, 60, seed=t), tuple(range(count)), t), metrics={TRAIN_LOSS: np.ones(count)}
            )
            for t in (1, 2, 3)
        ]
        plain = [replace(given, rows=tuple(some_rows(2, 60, seed=given.round)[:count])) for given in rounds]
        for rule in (FedHEAL(), FedPW()):
            for scaled, unscaled in zip(play(rule, rounds), play(rule, plain), strict=True):
                np.testing.assert_allclose(scaled.step, scale * unscaled.step, rtol=1e-9)


def test_fedheal_crosses_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = play(FedHEAL(), flipping_rounds())
    monkeypatch.setattr("strategies.rules.fedheal._BLOCK", 7)
    for one, other in zip(whole, play(FedHEAL(), flipping_rounds()), strict=True):
        np.testing.assert_array_equal(one.step, other.step)


# FedPW


def weighing(t: int) -> Updates:
    given = replace(updates(np.array(FEDPW_ROWS[t]), server_round=t + 1), arrays=(slice(0, 12), slice(12, 20)))
    return told(given, train_loss=FEDPW_LOSSES[t])


def test_fedpw() -> None:
    w = np.array(FEDPW_START)
    for golden, aggregate in zip(FEDPW, play(FedPW(), [weighing(t) for t in range(3)]), strict=True):
        w = w - aggregate.step
        found: Mapping[str, Any] = aggregate.diagnostics
        np.testing.assert_allclose(w, golden["w"], **CLOSE)
        np.testing.assert_allclose(list(found["weights"].values()), golden["weights"], **CLOSE)
        np.testing.assert_allclose(list(found["drop-rates"].values()), golden["drop"], **CLOSE)
        np.testing.assert_allclose(found["amplifications"], golden["scale"], **CLOSE)
        assert found["loss-momentum"] == pytest.approx(golden["beta_loss"], abs=1e-9)
        assert found["consensus-momentum"] == pytest.approx(golden["beta_dot"], abs=1e-9)
        assert found["loss-share"] == pytest.approx(golden["ratio"], abs=1e-9)


def test_fedpw_without_dropping_is_its_weighted_mean() -> None:
    rounds = [weighing(t) for t in range(3)]
    for given, aggregate in zip(rounds, play(FedPW(drop_rate=0.0), rounds), strict=True):
        shares = np.array(list(aggregate.diagnostics["weights"].values()))
        assert shares.sum() == pytest.approx(1, abs=1e-12)
        np.testing.assert_allclose(aggregate.step, shares @ np.array(given.rows), **CLOSE)


def test_fedpw_first_weights_are_loss_and_consensus_shares() -> None:
    given = weighing(0)
    matrix, losses = np.array(given.rows), given.metrics[TRAIN_LOSS]
    by_loss, products = losses / losses.sum(), matrix @ matrix.sum(axis=0)
    by_consensus = products / products.sum()
    _, state = FedPW().aggregate(given, {})
    for i in range(3):
        assert state[f"fedpw-loss-weight/{i}"] == pytest.approx(by_loss[i], abs=1e-12)
        assert state[f"fedpw-consensus-weight/{i}"] == pytest.approx(by_consensus[i], abs=1e-12)


def test_fedpw_drop_rates() -> None:
    rates = FedPW(0.3).drop_rates(np.array([1.0, 2.0, 4.0]))
    assert rates.mean() == pytest.approx(0.3)
    np.testing.assert_allclose(rates / rates[2], [4, 2, 1])
    np.testing.assert_allclose(FedPW(0.3).drop_rates(np.array([2.0, 2.0])), [0.3, 0.3])
    np.testing.assert_allclose(FedPW(0.9).drop_rates(np.array([1.0, 9.0])), [1.0, 0.18])
    np.testing.assert_allclose(FedPW(0.3).drop_rates(np.array([0.0, 1.0, 0.0])), [0.45, 0, 0.45])
    np.testing.assert_allclose(FedPW(0.3).drop_rates(np.array([0.0, 0.0])), [0.3, 0.3])


def test_fedpw_works_array_by_array() -> None:
    rounds = [weighing(t) for t in range(2)]
    joined = [replace(given, arrays=(slice(0, 20),)) for given in rounds]
    assert not np.allclose(play(FedPW(), rounds)[1].step, play(FedPW(), joined)[1].step)


def test_fedpw_columns_cross_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [told(updates(some_rows(3, 100, seed=t), server_round=t), train_loss=[1, 2, 3]) for t in (1, 2)]
    whole = play(FedPW(), rounds)[1].step
    monkeypatch.setattr("strategies.rules.fedpw._BLOCK", 7)
    np.testing.assert_array_equal(play(FedPW(), rounds)[1].step, whole)


def test_fedpw_survives_degenerate_rounds() -> None:
    rows = some_rows(3, 50)
    same, opposed = np.vstack([rows[0]] * 3), np.vstack([rows[0], -rows[0], 0 * rows[0]])
    single = np.vstack([rows[:1], 0 * rows[:2]])
    for matrices in itertools.product((rows, same, opposed, 0 * rows, single), repeat=2):
        for losses in ([0, 0, 0], [1, 1, 1], [0, 2, 1e300]):
            rounds = [told(updates(m, server_round=t), train_loss=losses) for t, m in enumerate(matrices, 1)]
            for aggregate in play(FedPW(), rounds):
                assert sum(aggregate.diagnostics["weights"].values()) == pytest.approx(1, abs=1e-9)
    equal = play(FedPW(), [told(updates(same, server_round=t), train_loss=[2, 2, 2]) for t in (1, 2)])
    for aggregate in equal:
        np.testing.assert_allclose(list(aggregate.diagnostics["weights"].values()), [1 / 3] * 3, rtol=1e-9)
    np.testing.assert_allclose(equal[0].step, rows[0], rtol=1e-9)


def test_fedpw_newcomers_start_at_the_mean_of_the_participants_known() -> None:
    first = told(updates(some_rows(2)), train_loss=[1, 3])
    second = told(updates(some_rows(3), server_round=2), train_loss=[2, 2, 2])
    _, state = FedPW(adaptation=0.5).aggregate(first, {})
    _, state = FedPW(adaptation=0.5).aggregate(second, state)
    # Weights (1/4, 3/4) and their mean 1/2, plus increments half of (1/8, 3/8, 0) and half of 1/3 each.
    raw = np.array([0.25 + 0.0625, 0.75 + 0.1875, 0.5]) + 1 / 6
    found = [state[f"fedpw-loss-weight/{i}"] for i in range(3)]
    np.testing.assert_allclose(found, raw / raw.sum(), rtol=1e-12)


def test_fedpw_keeps_equal_weights_without_adaptation() -> None:
    for aggregate in play(FedPW(adaptation=0.0), [weighing(t) for t in range(3)]):
        np.testing.assert_allclose(list(aggregate.diagnostics["weights"].values()), [1 / 3] * 3, rtol=1e-12)


# Hyper-parameters


@pytest.mark.parametrize(
    ("rule", "name", "value"),
    [
        (AFL, "multiplier_step", -0.1),
        (AFL, "multiplier_order", "last"),
        (AFL, "multiplier_owner", "nobody"),
        (AFL, "afl_output", "first"),
        (QFedAvg, "q", -1.0),
        (QFedAvg, "q", float("nan")),
        (TERM, "tilt", float("inf")),
        (TERM, "tilt_prior", "n"),
        (TERM, "tilt_normalizer", "none"),
        (FedFa, "accuracy_share", 1.1),
        (FedFa, "accuracy_time", "during"),
        (FedFa, "server_momentum", 1.0),
        (FedFa, "momentum_form", "nesterov"),
        (PropFair, "utility_baseline", 0.0),
        (PropFair, "utility_margin", 3.0),
        (PropFair, "utility_fallback", "none"),
        (PropFair, "server_learning_rate", -1.0),
        (Ditto, "personal_weight", -1.0),
        (Ditto, "personal_epochs", 1.5),
        (Ditto, "server_learning_rate", float("inf")),
        (FedHEAL, "sign_agreement", 1.5),
        (FedHEAL, "distance_momentum", -0.1),
        (FedHEAL, "newcomer_weight", "heavy"),
        (FedPW, "drop_rate", 1.5),
        (FedPW, "adaptation", -0.1),
    ],
)
def test_hyperparameters_out_of_range_are_named(rule: type[Rule], name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be .*, got "):
        rule(**{name: value})


@pytest.mark.parametrize("tilt", [1.0, -1.0])
@pytest.mark.parametrize("loss", [0.0, 1000.0])
def test_a_share_of_nothing_does_not_make_the_others_vanish(tilt: float, loss: float) -> None:
    # A client that claims 5e-324 examples and an extreme loss would else make every round overflow.
    rows = np.eye(3)
    honest = replace(updates(rows[:2], [10, 20]), metrics={LOSS_BEFORE: np.array([1.0, 2.0])})
    beside = replace(updates(rows, [10, 20, 5e-324]), metrics={LOSS_BEFORE: np.array([1.0, 2.0, loss])})
    expected, found = (TERM(tilt).aggregate(those, {})[0].step for those in (honest, beside))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert np.isfinite(found).all()
