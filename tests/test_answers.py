"""Answers that mean the same, answers that do not, and that no comparison takes long."""

import random
import re
import sys
from pathlib import Path

import pytest

import bench_answers
from support.extras import answers
from support.extras.answers import same_answer

# ≡ right, both ways. ≢ wrong, both ways. → right for that gold answer. ↛ wrong for that one.
# Four spaces stand between two pairs; the verdicts were written before the code ran.

PAIRS = r"""
    # plain, equal
    +5 ≡ 5    −5 ≡ -5    -0 ≡ 0    1/2 ≡ 0.5    \frac{1}{2} ≡ 0.5    \frac12 ≡ .5    \frac1{2} ≡ 1/2
    \dfrac{3}{4} ≡ \tfrac34    \cfrac{3}{4} ≡ 6/8    -\frac{1}{2} ≡ \frac{-1}{2}
    \frac{\frac{1}{2}}{3} ≡ 1/6    -1/3 ≡ \frac{-2}{6}    3\frac{1}{2} ≡ 3.5    3 1/2 ≡ 7/2
    -3\frac12 ≡ -3.5    1\!234 ≡ 1234    1,000,000 ≡ 10^6    50% ≡ 1/2    50 percent ≡ 0.5
    10^{-30} ≡ 1e-30    1.5\times 10^3 ≡ 1500    1.5 × 10^3 ≡ 1500    2.5 \cdot 10^{-2} ≡ 0.025
    \(5\) ≡ 5    \[5\] ≡ 5    \text{5} ≡ 5    \mathbf{5} ≡ 5    \displaystyle 5 ≡ 5    5\quad ≡ 5
    (5) ≡ 5    x=5 ≡ 5    f(x)=x^2 ≡ x^2    y = 2x+1 ≡ 2x+1    x \in (1,2) ≡ (1,2)
    5\mathrm{kg} ≡ 5    \frac{1}{2} cup ≡ 0.5    90^\circ ≡ 90    (5\text{ cm}, 6\text{ cm}) ≡ (5,6)
    (1,2) ≡ ( 1 , 2 )    \left(1,\frac12\right) ≡ (1,0.5)    (1, -2, 3) ≡ (1,-2,3)
    (-\infty, 3] ≡ (-\infty,3]    (-\infty,\infty) ≡ (-∞, ∞)    \langle 1,2\rangle ≡ (1,2)
    \{1,2,3\} ≡ \{3,2,1\}    1,2,3 ≡ 3, 1, 2    1, 2 ≡ \{1, 2\}    1 and 2 ≡ 2,1    x=1 or x=2 ≡ 2,1
    (1,2),(3,4) ≡ (3,4),(1,2)    (1,2)\cup(3,4) ≡ (3,4) \cup (1,2)    (1,2)∪(3,4) ≡ (1,2)\cup(3,4)
    \pm 3 ≡ 3,-3    2\pm\sqrt3 ≡ 2+\sqrt3, 2-\sqrt3    x = \pm 2 ≡ \pm 2
    \begin{pmatrix}1&2\\3&4\end{pmatrix} ≡ \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
    \begin{pmatrix}1\\2\end{pmatrix} ≡ \begin{pmatrix} 2/2 \\ 2 \end{pmatrix}
    2\sqrt{3} ≡ \sqrt{12}    \frac{1}{\sqrt{2}} ≡ \frac{\sqrt2}{2}    \sqrt{4} ≡ 2
    \sqrt[3]{8} ≡ 2    \sqrt[3]{16} ≡ 2\sqrt[3]{2}    sqrt(2) ≡ \sqrt{2}    2^{1/2} ≡ \sqrt2
    2\pi ≡ \pi\cdot 2    \frac{\pi}{2} ≡ 0.5\pi    2pi ≡ 2\pi    2π ≡ \pi*2    5! ≡ 120
    3 + \sqrt{2} ≡ \sqrt{2} + 3    \sqrt{-4} ≡ 2\sqrt{-1}    x+1 ≡ 1+x    (x+1)^2 ≡ x^2+2x+1
    \frac{x}{2} ≡ x/2    \frac{2}{3}x ≡ \frac{2x}{3}    3x^2y ≡ 3yx^2    ab ≡ ba    2(x+y) ≡ 2x+2y
    \frac{x^2-1}{x-1} ≡ x+1    x_1+x_2 ≡ x_{2}+x_{1}    e^2 ≡ e \cdot e    2^{n+1} ≡ 2\cdot2^n
    \sqrt{x^2+1} ≡ (x^2+1)^{1/2}    y=2x+1 ≡ 2x+1=y    y=2x+1 ≡ y=1+2x    x^2+y^2=4 ≡ 4=y^2+x^2
    x > 5 ≡ 5 < x    x \ge 5 ≡ 5 \le x    x >= 5 ≡ x \geq 5    1 \le x \leq 3 ≡ 1 ≤ x ≤ 3
    x \ne 3 ≡ 3 \neq x    \text{Tuesday} ≡ tuesday    \text{yes} ≡ Yes    Tuesday ≡ \textbf{Tuesday}
    man bites dog ≡ Man  bites dog    x_1+x_2 = a_n ≡ x_1 + x_2=a_n    \sin x + 1 ≡ \sin x+1
    5 million ≡ 5 Million    \emptyset ≡ \emptyset
    # plain, unequal
    1/2 ≢ 0.6    \frac{1}{2} ≢ \frac{2}{1}    (1,234) ≢ (1,235)    5 million ≢ 5    5 thousand ≢ 5
    5 dozen ≢ 5    5 billion dollars ≢ 5    5 cm ≢ 5 km    5 cm ≢ 6 cm    2xy ≢ 2
    5 apples and 3 pears ≢ 5    5 plus 3 ≢ 5    5 or 6 ≢ 5    \{5, 6\} ≢ 5    5 = 6 ≢ 5    \pm 5 ≢ 5
    (5,6) ≢ 5    (1,2) ≢ (2,1)    (1,2) ≢ \{1,2\}    (1,2) ≢ 1,2    [1,2) ≢ (1,2)
    \{1,2\} ≢ \{1,3\}    \{1,1,2\} ≢ \{1,2,2\}    1,1,2 ≢ 1,2,3    (-\infty,3) ≢ (\infty,3)
    (1,2)\cup(3,4) ≢ (1,2)\cup(3,5)    (1,2),(3,4) ≢ (2,1),(3,4)
    \begin{pmatrix}1&2\end{pmatrix} ≢ \begin{pmatrix}1\\2\end{pmatrix}
    \begin{pmatrix}1&2\\3&4\end{pmatrix} ≢ \begin{pmatrix}1&2\\3&5\end{pmatrix}
    \sqrt2 ≢ 1.41421356    \sqrt{2} ≢ \sqrt{3}    \sqrt{2} ≢ -\sqrt{2}    \sqrt[3]{8} ≢ \sqrt{8}
    \pi ≢ 22/7    2\pi ≢ 2    5! ≢ 5    x ≢ y    x^2 ≢ x^3    x^2 ≢ 2x    2x ≢ x2+1
    \sqrt{x^2} ≢ x    \sin x ≢ x    2\sin x ≢ \sin 2x    \log 2 ≢ 2\log    x+y ≢ xy    x=5 ≢ y=5
    x=5 ≢ x=6    y=2x ≢ y=3x    x>5 ≢ x<5    x>5 ≢ 5>x    x\ge5 ≢ x>5    x\ne5 ≢ x=5
    1<x<3 ≢ 1<x<4    1<x<3 ≢ 1<x\le3    x>5 ≢ 5    \text{Tuesday} ≢ Wednesday
    man bites dog ≢ dog bites man    evil ≢ live    dog ≢ god    9^{9^9} ≢ 1
    \frac{1}{0} ≢ \frac{2}{0}    0/0 ≢ 1    1000000! ≢ 1    (1 ≢ 1    \frac{1} ≢ 1    1+ ≢ 1
    __import__ ≢ 1    None ≢ 0    nan ≢ 0    inf ≢ 1e999
    # numbers
    -0.25 ≡ -\frac14
    # percent
    28\% ≡ 28 percent    28 \% ≡ \frac{7}{25}    12.5\% ≡ \frac18    33\frac{1}{3}\% ≡ \frac13
    50\text{ percent} ≡ 0.5
    # money
    \textdollar 5 ≡ 5    \text{\$}18 ≡ 18    \$5 ≢ 500
    # units
    15\mbox{ cm}^2 ≡ 15    125\textnormal{ miles} ≡ 125    18\pi\text{ cm}^3 ≡ 18\pi
    \frac{1}{3}\text{ meters} ≡ \frac13    72 km ≡ 72    3\sqrt{13}\text{ units} ≡ 3\sqrt{13}
    20 \text{ square units} ≡ 20    150 sq ft ≡ 150    45 minutes ≡ 45    17\text{ any thing} ≡ 17
    18\text{ cm}^3 ≢ 18\pi    3 pq ≢ 3    5\text{ halves} ≢ 5
    # words that change a value
    20\text{ million} ≡ 20000000    2.5\text{ billion} ≡ 2500000000    5\text{ thousand} ≡ 5000
    3 hundred ≡ 300    3\text{ million dollars} ≡ 3000000    \$3\text{ million} ≡ 3000000
    20 millions ≢ 20    4\text{ lakh} ≢ 4    4 crore ≢ 4    7\text{ tenths} ≢ 7    7 hundredths ≢ 7
    2\text{ thirds} ≢ 2    3 quarters ≢ 3    1 and a half ≢ 1    5 cubed ≢ 5
    5\text{ factorial} ≢ 5    5\text{ or so} ≢ 5    5\text{ or }6 ≢ 5    about 5 or 6 ≢ 5
    5 over 3 ≢ 5    5 point 3 ≢ 5    5\text{ base }7 ≢ 5
    # fractions
    \frac94\pi ≡ \frac{9}{4}\pi    \frac3{3} ≡ 1    \frac1x ≡ \frac{1}{x}
    \frac{x+2}{7} ≡ \frac{x}{7}+\frac{2}{7}    1/2/2 ≢ 1
    # mixed numbers
    2\ \frac{1}{4} ≡ \frac94    1\frac{3}{4}\text{ cups} ≡ 1.75    -2 \frac{1}{3} ≡ -\frac{7}{3}
    5\frac{1}{2} ≢ \frac52
    # roots
    \sqrt[3]{-8} ≡ -2    \sqrt[3]{-27}+1 ≡ -2    \sqrt[3]{x} ≡ x^{1/3}
    \frac{1}{3\sqrt[3]{x}^2} ≡ \frac{1}{3x^{2/3}}
    \frac{10\sqrt{10.5}}{27} ≡ \frac{5\sqrt{42}}{27}
    \frac{\sqrt{\sqrt{11}+\sqrt{7}}}{15+\sqrt{33}} ≡ \frac{\sqrt{\sqrt{7}+\sqrt{11}}}{\sqrt{33}+15}
    \sqrt{\frac{1}{2}} ≡ \frac{\sqrt{2}}{2}    3√13 ≡ 3\sqrt{13}    4\sqrt{2} ≢ 4
    \frac{1+\sqrt5}{2} ≢ 2    \frac{1+\sqrt5}{2} ≢ \frac{1-\sqrt5}{2}    \sqrt[3]{-8} ≢ 2
    \sqrt{-4} ≢ -2
    # functions
    \tan^2(y)+1 ≡ \tan^2 y + 1    2 \sin b \cos a ≡ 2\cos(a)\sin(b)    \sin x ≡ \sin(x)
    sin x ≡ \sin x    \sin^2 x + \cos^2 x ≡ 1    \sin 2x ≡ 2 \sin x \cos x
    \sin\left(\frac{\pi}{6}\right) ≡ \frac12    \cos\frac{\pi}{3} ≡ 0.5    \cos \pi ≡ -1
    \sin \pi ≡ 0    \sin 30^\circ ≡ \frac{1}{2}    \cos(60^{\circ}) ≡ 0.5    \tan 45^\circ ≡ 1
    \cos 72^\circ ≡ \frac{\sqrt5-1}{4}    \arctan 1 ≡ \frac{\pi}{4}
    \arcsin\frac12 ≡ \frac{\pi}{6}    \tan^{-1}(1) ≡ \frac{\pi}{4}    \cos^{-1} 0 ≡ \frac{\pi}{2}
    \arctan\frac{1}{2} ≡ \tan^{-1}(0.5)    \ln e^2 ≡ 2    \ln(e) ≡ 1    \ln 8 ≡ 3\ln 2
    \ln\frac{1}{2} ≡ -\ln 2    \ln 6 ≡ \ln 2 + \ln 3    \ln{2} ≡ \ln(2)    \ln 2 ≡ \log_e 2
    e^{\ln 3} ≡ 3    \exp(2) ≡ e^2    \exp{x} ≡ e^{x}    \log_2 8 ≡ 3    \log_{2}{8} ≡ 3
    \log_3 \frac{1}{9} ≡ -2    \log_{10} 1000 ≡ 3    \frac{\log 8}{\log 2} ≡ 3
    \log_2 3 ≡ \frac{\ln 3}{\ln 2}    \log 100 ≡ 2    1-\frac{1}{\mathrm{e}} ≡ 1 - e^{-1}
    \sec x ≡ \frac{1}{\cos x}    \tan^2(y)+1 ≡ \sec^2(y)    \cot x ≡ \frac{\cos x}{\sin x}
    \sin(x)y ≡ y\sin x    \operatorname{arctan} 1 ≡ \frac{\pi}{4}    \sin^{-1} x ≢ \frac{1}{\sin x}
    \sin(x+y) ≢ \sin x + \sin y    \sin 30 ≢ \frac12    \ln 2 ≢ 0.693147    \ln 2 ≢ \log 2
    \log_2 8 ≢ \log 28    \log_2 8 ≢ \log_8 2    1 - \frac{1}{\mathrm{e}} ≢ 1 + \frac{1}{\mathrm{e}}
    \arctan 2 ≢ \frac{\pi}{4}    \cos x ≢ \cos(-2x)    e^2 ≢ 7.389056
    # absolute values
    |x| ≡ |-x|    |-5| ≡ 5    \lvert x-1 \rvert ≡ |1-x|    \left|\frac{-3}{2}\right| ≡ 1.5
    2|x| ≡ |2x|    |x||y| ≡ |xy|    ||x|-1| ≡ |1-|x||    \sqrt{x^2} ≡ |x|    |x+y| ≢ |x|+|y|
    # infinity
    \infty ≡ ∞    +\infty ≡ \infty    -\infty ≡ -∞
    (-\infty, \infty) ≡ \left(-\infty, +\infty\right)    \infty ≢ -\infty    \infty - \infty ≢ 0
    0 \cdot \infty ≢ 0    \frac{\infty}{\infty} ≢ 1    \infty ≢ 10^{300}
    # names in front
    \theta = \frac{\pi}{3} ≡ \frac{\pi}{3}    a_n = 2^n ≡ 2^n
    f^{-1}(x) = \frac{x-1}{2} ≡ \frac{x-1}{2}    (x,y) = (3,4) ≡ (3,4)    |AB| = 5 ≡ 5
    \frac{NO}{BO} = \frac{2}{3} ≡ \frac23    f(3) = 7 ≡ 7    P(A) = \frac{1}{6} ≡ \frac16
    z = 1 + 1 = 2 ≡ 2    x = \frac13 \approx 0.33 ≡ \frac13
    \frac{\sqrt3}{3} \approx 0.577 ≡ \frac{\sqrt3}{3}    \angle ABC = 60^\circ ≡ 60    AB = 12 ≡ 12
    x\in\{1,2\} ≡ \{1,2\}    p(x) = x^2 - 1 ≡ (x-1)(x+1)    \text{Area} = 24 ≡ 24
    \alpha = 30^\circ ≡ 30    n=1, 2, 3 ≡ n = 3, 2, 1    D = (0, 1) ≡ (0,1)    2x = 10 ≢ 10
    x^2 = 4 ≢ 4    x + y = 5 ≢ 5    7 = 11a+c ≢ 11a+c    a + 3z = 0 ≢ 0    x = 5 = 6 ≢ 6
    x = y + 3 = 5 ≢ x = 5    x = 11 ≢ 12    n=2, 3, 4 ≢ n=1, 2, 3    D = (0, 1.5) ≢ (0,1)
    3 \approx 3.14 ≢ 3.14    \frac{1}{3} \approx 0.33 ≢ 0.33
    # equations
    34x+45y-20z+100=0 ≡ -34x-45y+20z-100=0    2x+4y-3=0 ≡ y=-\frac{1}{2}x+\frac{3}{4}
    x^2/4 + y^2/3 = 1 ≡ x^2/16 + y^2/12 = 1/4    2x = 10 ≡ x = 5    y-1 = 2(x-3) ≡ y = 2x - 5
    4x^2 + 9y^2 = 36 ≡ \frac{x^2}{9}+\frac{y^2}{4} = 1    y = x ≡ x = y
    a_3 = 2, a_{37} = 19 ≡ a_{37} = 19, \quad a_3 = 2    x=1, y=2 ≡ y=2, x=1    y = 2x ≢ y = -2x
    xy = 0 ≢ x = 0    x^2 = 1 ≢ x = 1    x^2 + y^2 = 4 ≢ x^2 + y^2 = 2    1 = 1 ≢ 2 = 2
    x = x ≢ y = y
    # inequalities
    x \lt 3 ≡ x < 3    x \leqslant 2 ≡ x <= 2    x \neq 5 ≡ x != 5    x < 1 ≡ -x > -1
    x <= 1 ≡ -x >= -1    2x > 4 ≡ x > 2    x - 3 > 0 ≡ x > 3    -2 \le x \le 7 ≡ 7 \ge x \ge -2
    -2 \le x \le 7 ≡ x \in [-2,7]    -793 < a < 10 ≡ (-793, 10)    x > 5 ≡ (5, \infty)
    x \le 3 ≡ (-\infty, 3]    x < 1 ≢ x > -1    x \ge 5 ≢ x \le 5    2x > 4 ≢ x < 2
    -2x > 4 ≢ x > -2    -2 \le x \le 7 ≢ (-2, 7)    -2 \le x \le 7 ≢ x \in [-2,8]
    x > 5 ≢ [5, \infty)    f(2) < f(1) < f(4) ≢ f(1) < f(2) < f(4)
    # intervals
    \left[-1,-\tfrac12\right) \cup (0,1) ≡ [-1, -\frac{1}{2}) \cup (0, 1)
    \{-1\} \cup [0,7) ≡ [0,7) \cup \{-1\}    (\frac{3}{5},\frac{8}{3}] ≡ (0.6,\frac{16}{6}]
    k \in [-36,104] ≡ [-36, 104]    x \in (-\infty,2)\cup(3,\infty) ≡ (-\infty,2)\cup(3,\infty)
    ]0,1[ ≡ ]0, 1[    x \in (1,234) ≢ 1234    \displaystyle (1,234) ≢ 1234    1 ≢ -[0,1)
    (1,2) \cap (0,3) ≢ (1,2) \cup (0,3)
    # tuples
    (3, \frac{\pi}{2}) ≡ \left( 3, \frac{\pi}{2} \right)
    \left(\frac{1}{5},\frac{1}{6}\right) ≡ (1/5, 1/6)    (1,2) \text{ and } (3,4) ≡ (3,4),(1,2)
    (-6, 10) ≢ (10, -6)    (1,2),(3,4) ≢ (1,4),(3,2)    (0,0) ≢ (\frac{27}{8},\frac{15}{8})
    # lists and sets
    -2,1 ≡ 1, -2    x=1\text{or}x=2 ≡ x = 2, x = 1    1 or 2 ≡ 2 or 1    \{2,3,5\} ≡ 5,3,2
    \sqrt2, 1, \sqrt2 ≡ 1, \sqrt{2}, \sqrt{2}    1 \pm \sqrt{19} ≡ 1+\sqrt{19}, 1-\sqrt{19}
    1 \pm \sqrt{19}. ≡ 1 \pm \sqrt{19}    \{1\pm\sqrt{5},-2\} ≡ \{-2, 1+\sqrt5, 1-\sqrt5\}
    \pm 2021 ≡ \{-2021, 2021\}    x = \pm 2 ≡ x = 2, x = -2    x = 2 \pm i ≡ 2+i, 2-i
    \pm 1, \pm 3 ≡ -3,-1,1,3    \frac{1 \pm \sqrt5}{2} ≡ \frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}
    3 \pm 2\sqrt2 ≢ 3 + 2\sqrt2    19, 46, 82 ≢ 21, 36, 82    1, 2, 3 ≢ 1, 2
    1, 2, 3, ... ≢ 1, 2, 3    1, 2, \ldots ≢ 1, 2
    # matrices
    \begin{pmatrix} 0 & 3 \\ 0 & -1 \end{pmatrix} ≡ \begin{bmatrix}0&3\\0&-1\end{bmatrix}
    \left[\begin{array}{cc}1 & 2 \\3 & 4\end{array}\right] ≡ \begin{pmatrix}1&2\\3&4\end{pmatrix}
    \begin{pmatrix}-\frac{7}{4}&-2\\4&1\\\end{pmatrix} ≡ \begin{pmatrix}-1.75&-2\\4&1\end{pmatrix}
    \begin{pmatrix} 1 \\ 2 \\ \end{pmatrix} ≡ \begin{pmatrix}1\\2\end{pmatrix}
    \begin{pmatrix}\frac{1}{2}x & \sin x\end{pmatrix} ≡ \begin{pmatrix}x/2&\sin(x)\end{pmatrix}
    \begin{matrix}1&2\end{matrix} ≡ \begin{pmatrix}1&2\end{pmatrix}
    A = \begin{pmatrix}1&2\\3&4\end{pmatrix} ≡ \begin{pmatrix}1&2\\3&4\end{pmatrix}
    \begin{pmatrix}1\\2\end{pmatrix} ≢ \begin{pmatrix}1\\2\\3\end{pmatrix}
    # algebra
    x^2+2x+1 ≡ x^2 + 2*x - (-1)    y = x^2+2x+1 ≡ 2x+ 1+x^2    2-2p ≡ -2p+2
    \frac{\pi r}{h+r} ≡ \frac{r\pi}{r+h}    6r^2-4r-24 ≡ 2(3r^2-2r-12)    x^3+3x-6 ≡ 3x-6+x^3
    -x^4-7x^3+3 ≡ 3 - 7x^3 - x^4    3ab ≡ 3ba    x(x+1) ≡ x^2+x
    \frac{n(n+1)}{2} ≡ \frac{n^2+n}{2}    a^{-1} ≡ \frac1a    2i ≡ i \cdot 2    1+2i ≡ 2i+1
    x+2n+1 ≢ x+1    (a+5)(b+2) ≢ (+5)(b+2)    x^2+2x+1 ≢ x^2+2x-1    3-4i ≢ 3+4i    x(x+1) ≢ x^2+1
    n! ≢ n    (n+1)! ≢ n!
    # angles and ratios
    90^{\circ} ≡ 90°    3:5 ≡ 6:10    3:5 ≡ \frac35    90^\circ ≢ \frac{\pi}{2}    180 ≢ \pi
    3:5 ≢ 5:3    1:2:3 ≢ 1:2
    # sets that have names
    \mathbb{R} ≡ \text{all real numbers}    x \in \mathbb{R} ≡ \mathbb{R}    \emptyset ≡ \varnothing
    ∅ ≡ \emptyset    \emptyset ≢ 0    \emptyset ≢ \{0\}    \mathbb{R} ≢ R
    # words
    \text{Evelyn} ≡ Evelyn    (C) ≡ C    \text{E} ≡ E    \text{ Navin } ≡ \text{navin}
    \text{The points form a hexagon} ≡ the points form a hexagon    p - q ≡ -q + p    (C) ≢ (D)
    \text{Evelyn} ≢ \text{Briana}    \text{odd} ≢ \text{even}    bca ≢ abc    xyz ≢ zyx
    xyz ≡ x \cdot yz    2abc ≡ 2cab    \text{The value is }5 ≡ 5    \text{one of the roots is }5 ≢ 5
    5\text{ thirty-seconds} ≢ 5    3 sixty-thirds ≢ 3    3abc ≡ 3bca    abc ≡ a \cdot bc
    # garbage
    \sum_{k=0}^{n-1} F_k ≡ \sum_{k=0}^{n-1} F_k    \sum_{k=0}^{n-1} F_k ≢ \sum_{k=0}^{n-2} F_k
    \frac{}{} ≢ 1    \sqrt{} ≢ 0    \left( ≢ 1    \infty\infty ≢ 1    x_ ≢ x    ... ≢ 1
    # completions of models
    \frac{1}{2}(x+1) ≡ \frac{x+1}{2}
    \left( -\infty, -2 \right) \cup \left( 2, \infty \right) ≡ (-\infty,-2)\cup(2,\infty)
    -\sqrt{2} ≡ -2^{1/2}    \text{6 inches} ≡ 6    \frac{15}{2}\text{ cm} ≡ 7.5
    \underline{\underline{42}} ≡ 42    \fbox{42} ≡ 42    {\bf 42} ≡ 42    \large 42 ≡ 42
    \color{red}{42} ≡ 42    {\color{blue} x+1} ≡ x+1    \frac{\textcolor{red}{1}}{2} ≡ 1/2
    \color{red}{43} ≢ 42    \emph{Tuesday} ≡ Tuesday    42^\circ\text{C} ≡ 42    \frac{a}{b} ≡ a/b
    \frac{a+b}{c} ≡ (a+b)/c    a+b/c ≢ (a+b)/c    x = -\frac{1}{2} ≡ -0.5
    x=\frac{-b\pm\sqrt{b^2-c}}{2a} ≡ \frac{-b+\sqrt{b^2-c}}{2a}, \frac{-b-\sqrt{b^2-c}}{2a}
    y=x^2 ≡ x^2    0 \leq x < 2 ≡ [0,2)    0 < x < 2 ≢ [0,2]    \{x \mid x > 2\} ≡ \{x \mid x > 2\}
    \text{1, 3, and 5} ≡ 1,3,5    \ln(x^3) ≢ \ln x    (2^x)^y ≢ 2^{x^y}    e^{i\pi} ≢ 1    i^2 ≡ -1
    (1+i)^2 ≡ 2i    \frac{1}{i} ≡ -i    |3+4i| ≡ 5    \sqrt{-1} ≡ i    -1 + \sqrt{3}i ≡ -1+i\sqrt{3}
    \cos(-x) ≡ \cos x    \sin(-x) ≢ \sin x    2\cos^2 x - 1 ≡ \cos 2x
    1 - \sin^2\theta ≡ \cos^2 \theta    \sin^2 x ≡ (\sin x)^2    \sin x^2 ≡ \sin(x^2)
    \sqrt{2}\sin x ≢ \sin\sqrt{2}x    5 \choose 2 ≢ 5    \lfloor 3.5 \rfloor ≢ 3.5
    \vec{v} = (1,2) ≡ (1,2)
    \mathbf{v} = \begin{pmatrix} 1 \\ 2 \end{pmatrix} ≡ \begin{pmatrix} 1 \\ 2 \end{pmatrix}
    \begin{vmatrix}1&2\\3&4\end{vmatrix} ≢ \begin{pmatrix}1&2\\3&4\end{pmatrix}
    \begin{cases} x=1 \\ y=2 \end{cases} ≢ 1    x=1,\ y=2 ≡ x=1, y=2
    x=1 \text{ and } y=2 ≡ y=2, x=1    a=1,b=2 ≢ 2, 1    m\angle A = 30^\circ ≡ 30
    \sin A = \frac{3}{5} ≡ \frac35    n = 12 \text{ sides} ≡ 12    12 \text{ sides} ≡ n=12
    \approx 12 ≢ 13    12 (twelve) ≢ 13    twelve ≡ Twelve    A, B ≡ B, A    A, B ≢ A    A) 5 ≢ 5
    \text{None of the above} ≡ none of the above    \text{true} ≡ True    \text{true} ≢ \text{false}
    \text{undefined} ≡ undefined    \text{undefined} ≢ 0
    \text{no solution} ≢ \text{infinitely many solutions}    x ≢ -x    -x ≢ |x|    \sqrt{u^2} ≢ -u
    x^2 ≢ 2^x    0.1+0.2 ≡ 0.3    1/3+1/3 ≡ 2/3    5^{\circ}30' ≢ 5    July 4 ≢ 4
    Monday ≡ \text{Monday}    1st ≢ 2nd    2/3\text{ cup} ≡ \frac23
    \frac{2}{3}\text{ of a cup} ≢ \frac{3}{2}    3\text{ red and }2\text{ blue} ≢ 3    2:3 ≡ 4:6
    5 + 0i ≡ 5    (-7) ≡ -7    2-3 ≡ -1    (\sqrt{2}+1)(\sqrt{2}-1) ≡ 1
    \sqrt{3+2\sqrt{2}} ≡ 1+\sqrt{2}    \frac{1+\sqrt{5}}{2} ≡ \frac{2}{\sqrt{5}-1}
    \frac{22}{7} ≢ \pi    \pi^2 ≢ 10    \frac\pi2 ≡ \frac{\pi}{2}    \frac{\pi}2 ≡ \frac12\pi
    2\pi r ≡ 2r\pi    \pi r^2h ≡ hr^2\pi    4\pi\text{ square units} ≡ 4\pi
    36\pi\text{ ft}^3 ≢ 36\pi\text{ square feet}
    # further completions
    approximately 5 ≡ 5    \text{about } 12 ≡ 12    \text{The final answer is } 12 ≡ 12
    5 slices of pizza ≡ 5    5\text{ more apples} ≡ 5    5\text{ times} ≡ 5
    7\text{ boys and 8 girls} ≢ 7    5 mil ≢ 5    5th ≢ 5    between 5 and 6 ≢ 5    5-6 ≢ 5
    5--6 ≢ 5    5 \neq 6 ≢ 5    |x| = -5 ≢ 5    -x = 5 ≡ x = -5    x = 5 ≡ x - 5 = 0
    \sqrt{2} \approx 1.414 ≡ \sqrt2    \sqrt{2} \approx 1.414 ≢ 1.414
    0.5 \text{ or } \frac{1}{2} ≢ 0.25    \pi\text{ cm}^2 ≡ \pi    \pi \text{ square units} ≡ π
    \pi\text{ cm}^2 ≢ \pi\text{ cm}^3    x\text{ cm} ≢ x    no ≢ on    5 tens ≢ 5    5 twelfths ≢ 5
    5\text{ sixteenths} ≢ 5    5 ten-thousandths ≢ 5    7 twentieths ≢ 7    5\text{ millionths} ≢ 5
    5\text{ score} ≢ 5    5\text{ below zero} ≢ 5    5 months ≡ 5    5\text{ widths} ≡ 5
    5 teeth ≡ 5    \frac{1}{2} = 0.5 ≢ 0.25    \ln|x| ≡ \ln|-x|    x\ln x - x ≡ x(\ln x - 1)
    \ln|x| + C ≡ C + \ln|x|    e^{-x^2} ≡ \frac{1}{e^{x^2}}
    \frac{e^x + e^{-x}}{2} ≡ \frac{e^{2x}+1}{2e^x}    \sqrt{1-x^2} ≢ 1-x
    \sin\theta\cos\theta ≡ \frac{1}{2}\sin 2\theta    \sin(2x)\cos(x) ≡ 2\sin x\cos^2 x
    \tan\frac{x}{2} ≡ \frac{\sin x}{1+\cos x}    \cos 2x ≡ \cos^2 x - \sin^2 x
    \arcsin x + \arccos x ≢ \pi    \log_2 \frac18 ≡ -3    \left(\frac{3}{2}\right)^3 ≡ \frac{27}{8}
    (\sqrt{3})^4 ≡ 9    8^{2/3} ≡ 4    (-8)^{1/3} ≡ -2    4^{-1/2} ≡ \frac12    2^{10} - 1 ≡ 1023
    5 \cdot 4! ≡ 120    7^{-2} ≡ \frac{1}{49}    1{,}000{,}000 ≡ 10^{6}
    x = \frac{1}{2}, y = -3 ≡ y=-3, x=0.5    \left(\frac12, -3\right) ≡ (0.5, -3)
    (\frac12, -3) ≢ (-\frac12, 3)    \left\{-\frac12, 3\right\} ≡ \{3, -0.5\}
    -\frac12, 3 ≡ x = 3, x = -\frac12    x = -\frac12 \text{ or } x = 3 ≡ -\frac12, 3
    x<-2 \text{ or } x>2 ≢ x > 2, x < -2    (-\infty,-2)\cup(2,\infty) ≢ (-2,2)
    [2,\infty) ≢ (2,\infty)    2\le x ≡ [2,+\infty)    y\in(-\infty,0] ≡ (-\infty,0]
    \{0\}\cup[1,2] ≢ [0,2]    \mathbb{R}\setminus\{0\} ≡ \mathbb{R} \setminus \{0\}
    \mathbb{R}\setminus\{0\} ≢ \mathbb{R}
    \begin{pmatrix}1\\-1\end{pmatrix} ≢ \begin{pmatrix}-1\\1\end{pmatrix}
    \begin{bmatrix} \frac{1}{2} \\ 0.25 \end{bmatrix} ≡ \begin{pmatrix} 0.5 \\ \frac14 \end{pmatrix}
    \text{A, C, D} ≡ A, C, D    \text{B, because } x=5 ≢ 5    \text{Friday} ≢ \text{Monday}
    \text{Friday, May 5} ≢ 5    \text{increasing} ≡ Increasing    \text{infinite} ≢ \infty
    \$10 ≢ 10\%    1 \text{ hour } 30 \text{ minutes} ≢ 1    1:2 ≡ \frac{1}{2}    2:1 ≢ \frac12
    \begin{pmatrix}1&2\end{pmatrix}+\begin{pmatrix}1\\2\end{pmatrix} ≢ \begin{matrix}2&4\end{matrix}
    2\begin{pmatrix}1\\2\end{pmatrix} ≢ \begin{pmatrix}1\\2\end{pmatrix}
    # many digits
    10^{15}+\sqrt2 ≢ 10^{15}+\sqrt3    \ln(10^{15}+1) ≢ \ln(10^{15})    \sqrt{10^{30}+1} ≢ 10^{15}
    \sin(10^{-25}) ≢ 10^{-25}    e^{10^{-15}} ≢ 1    1 + e^{-60} ≢ 1
    \sqrt[3]{60}+\sqrt{7}-\frac{1}{10^{20}} ≢ \sqrt[3]{60}+\sqrt{7}    99-70\sqrt2 ≡ (\sqrt2-1)^6
    \sqrt{10^{20}+2\cdot 10^{10}+1} ≡ 10^{10}+1    \sqrt{5+2\sqrt6}-\sqrt3 ≡ \sqrt2
    \sqrt[3]{2+\sqrt5}+\sqrt[3]{2-\sqrt5} ≡ 1    e^{100} ≡ (e^{50})^2
    # pi and e
    e^{i\pi} ≡ -1    e^{\frac{i\pi}{2}} ≡ i    e^{2\pi i/3} ≡ -\frac12+\frac{\sqrt3}{2}i
    \sin(x+2\pi) ≡ \sin x    \cos(x+\pi) ≡ -\cos x    \sin(\frac{\pi}{2}-x) ≡ \cos x
    \ln(-1) ≡ i\pi    \cos\frac{2\pi}{5} ≡ \frac{\sqrt5-1}{4}
    \arctan 2+\arctan 3 ≡ \frac{3\pi}{4}    \arcsin x+\arccos x ≡ \frac{\pi}{2}
    \cos(i) ≡ \frac{e+e^{-1}}{2}    \sqrt{i} ≡ \frac{1+i}{\sqrt2}    x \in (0,\pi] ≡ 0 < x \le \pi
    \sin(x+\pi) ≢ \sin x    \tan\frac{\pi}{2} ≢ 1    \sin e ≢ 0
    # chains
    2+3=5 ≡ 5    \frac{10}{2} = 5 ≡ 5    (x+1)^2 = x^2+2x+1 ≡ x^2+2x+1    2+3=6 ≢ 6
    # notation
    {1\over2} ≡ \frac12    \begin{pmatrix}1\\[4pt]2\end{pmatrix} ≡ \begin{pmatrix}1\\2\end{pmatrix}
    \begin{pmatrix}\frac12\\[0.5em]-1\end{pmatrix} ≡ \begin{pmatrix}0.5\\-1\end{pmatrix}
    2\binom{10}{3} ≡ 240    ½ ≡ 0.5    ¾x ≡ \frac{3x}{4}    x⁴ ≡ x^4    x¹² ≡ x^{12}    10⁻³ ≡ 0.001
    2ⁿ⁺¹ ≡ 2^{n+1}    α ≡ \alpha    2πr ≡ 2\pi r    λ+1 ≡ 1+\lambda    5°C ≡ 5^\circ\text{C}
    5 m² ≡ 5    12 cm² ≡ 12\text{ cm}^2    All real numbers ≡ \mathbb{R}    {1\over2} ≢ \frac{1}{3}
    x¹² ≢ x^1 \cdot 2    5 m² ≢ 5 cm²    \binom{5}{2} ≢ \frac52    \binom{n}{2} ≢ \frac{n^2}{2}
    all real numbers except zero ≢ \mathbb{R}
    # products of matrices, series, sizes
    \begin{matrix}0&1\\0&0\end{matrix}\begin{matrix}1\\0\end{matrix} ≢ \begin{matrix}1\end{matrix}
    \begin{pmatrix}1&2\end{pmatrix}\begin{pmatrix}3&4\end{pmatrix} ≢ \begin{pmatrix}3&8\end{pmatrix}
    \sum_{k=1}^{n} k ≢ \prod_{k=1}^{n} k    x < -2 \text{ or } x > 2 ≡ (-\infty,-2)\cup(2,\infty)
    |x| < 3 ≢ [-3, 3]    |x| > 3 ≢ (-3, 3)    1 < |x| \le 2 ≢ (1, 2]
    # plain sympy golds, second suite
    7 \sin(\frac{\pi}{5}x) + 1 ≡ 7*sin(pi*x/5)+1    a^x \ln a ≡ ln(a)*a^x
    7z - \cos z + 11 ≡ 7*z-cos(z)+11    3\cos(2\sqrt{35}t) ≡ 3*cos(sqrt(980/7)*t)
    \dfrac{8}{5 - 4\cos(q^2)} ≡ 2*8/(2 + 1*8 - 1*8*cos(q^2))    -162\pi ≡ -pi*2*9^2
    e^{-8x} \cos(9x) ≡ x^0*e^(-8*x)*cos(9*x)    \frac{\sqrt{3}}{3} ≡ 1/sqrt(3)
    (-\infty, 5) ≡ (-infinity,5)    (-\infty, 5] ≢ (-infinity,5)    T = 1.02x + 10 ≡ T = 1.02*x+10
    10\sqrt{2} ≢ 5*(1+sqrt(2))    \sin(x) ≢ cos(x)    e^{x} ≢ e^{2x}    \frac{1}{x} ≢ \frac{1}{x^2}
    -1 + exp(16) ≡ e^{16} - 1    pi/2 ≡ \dfrac{\pi}{2}    14.0 + -1.0i ≡ 14 - i    -2*pi ≡ -2\pi
    Theta(log log n) ≢ O(\log \log n)    (0, 2\cos x \sin x) ≡ (0,2*cos(x)*sin(x))
    x**2 - 4*x + 4 ≡ (x-2)^2    sqrt(x^2+1)/x ≡ \frac{\sqrt{1+x^2}}{x}
    # contest answers, second suite
    847288609444 ≡ 3^{25} + 1    1/2,1,2 ≡ \left\{\frac{1}{2}, 1, 2\right\}
    180 - 2\alpha ≡ 180^\circ - 2\alpha
    A(x)=\frac{1}{2}(x^2-x-4) ≡ \frac{1}{2}x^2 - \frac{1}{2}x - 2    f(x)=2x^3+c ≢ f(x)=2x^3
    1 and odd prime numbers ≢ 1 and even prime numbers    \frac{1}{2004!} ≢ \frac{1}{2006!}
    \frac{2^{2005}+1}{3 \cdot 2^{2006}} ≢ \frac{1}{3 \cdot 2^{2006}}
    1, 2, \ldots, n ≢ 1, 3, 5, \ldots, 2n-1    1:2:3:\ldots ≢ 1:4:9:\ldots
    \sqrt{1/n} ≡ \frac{1}{\sqrt{n}}    f(x) = 0 ≢ \forall x>0, f(x) = 0
    3*x-1*y+13=0 ≢ 3x + 4y + 14=0    a=1 \text{ or } a=-2 ≡ a = -2, 1    2^{u-2} ≡ \frac{2^u}{4}
    \left\lfloor \frac{n}{2} \right\rfloor ≡ \lfloor n/2 \rfloor
    \lceil \frac{n+1}{2} \rceil ≢ \lfloor \frac{n+1}{2} \rfloor    3 \cdot 2^{1011} ≢ 2^{1011}
    \binom{2n}{n} ≢ \binom{2n}{n-1}    \gcd(m,n) ≡ \gcd(m, n)
    n \equiv 1 \pmod{4} ≡ n\equiv 1 \pmod 4    2^{n-1}(n+2) ≡ (n+2)2^{n-1}    (n-1)! ≢ n!
    \frac{(2n)!}{n!(n+1)!} ≢ \frac{(2n)!}{n!n!}    n=p^k ≢ n=p
    # mixed numbers and fractions, second suite
    +11 5/6 ≡ \frac{71}{6}    0 4/9 ≡ \frac49    4 4/0 ≢ 4    11 + 4/9 ≢ 11 - 4/9
    4 4/9\% ≡ \frac{40}{900}    -1\frac{1}{2} ≢ -\frac12    7 / 8 ≡ \frac78
    \frac{\frac{3}{4}}{\frac{1}{2}} ≡ 1.5    \frac{-3x+2}{-5} ≡ \frac{3x-2}{5}
    # letters and choices, second suite
    E ≢ \mathrm{E}*2    \sqrt{67},-\sqrt{85} ≢ \sqrt{67}    \mathrm{(D)}\ 12 ≢ 13
    \text{True} ≢ \text{Yes}    \text{odd} ≢ \text{oddd}    \text{Alice, Bob} ≢ \text{Alice}
    \text{Thursday} ≡ \text{thursday}.    MONDAY ≡ Monday    \text{acute} ≢ \text{obtuse}
    parallelogram ≡ \text{Parallelogram}
    \text{cannot be determined} ≡ \text{Cannot be determined}
    # word problems, second suite
    \text{Rs. } 450 ≡ 450    ₹450 ≡ 450    ¥1200 ≡ 1200    10 \mathrm{~cm} ≢ 10 \mathrm{~mm}
    5 pm ≢ 5    25 years old ≡ 25    at least 17 ≢ 17    17 (seventeen) ≢ 18
    5/8 of the cake ≢ 8/5    -\$20 ≡ -20    20\% \text{ off} ≢ 20    increased by 20 ≢ 30
    # calculus and linear algebra, second suite
    \frac{x^3}{3}+C ≡ \frac{1}{3}x^3 + C    \frac{x^3}{3}+C ≢ \frac{x^3}{3}
    y = Ce^{2x} ≡ y = C e^{2 x}    y=C_1e^{x}+C_2e^{-x} ≡ y = C_1 e^x + C_2 e^{-x}
    \sinh x ≡ \frac{e^x-e^{-x}}{2}    \arctan(x)+C ≡ \tan^{-1}x + C    \ln|\sec x| ≡ -\ln|\cos x|
    \frac{\partial f}{\partial x} = 2x ≡ 2x
    \begin{bmatrix} 1 & 0 \\ 0 & 1 \end{bmatrix}^{-1} ≢ \begin{bmatrix} 1 & 2 \\ 0 & 1 \end{bmatrix}
    \mathbf{i} + 2\mathbf{j} ≡ 2\mathbf{j}+\mathbf{i}    \det A = -2 ≡ -2
    \log_{2}{3} \cdot \log_{3}{4} ≡ 2    \sin^4 x - \cos^4 x ≡ -\cos 2x    \csc^2 x - \cot^2 x ≡ 1
    e^{2\ln x} ≡ x^2    \sqrt{2+\sqrt{3}} ≡ \frac{\sqrt6+\sqrt2}{2}    \sqrt[4]{4} ≡ \sqrt{2}
    \cos\frac{\pi}{7}\cos\frac{2\pi}{7}\cos\frac{4\pi}{7} ≡ -\frac18    \tan 15^\circ ≡ 2-\sqrt3
    # sets, intervals, domains, second suite
    x\in\mathbb{R}, x\ne 2 ≢ x \in \mathbb{R}    \{x : x > 2\} ≡ \{x:x>2\}
    [2, 3) \cup (3, 4] ≡ (3,4] \cup [2,3)    2 < x < 3 \text{ or } x > 5 ≡ (2,3)\cup(5,\infty)
    x > 2 \text{ and } x < 5 ≢ (-\infty, 5)    \{(1,2),(3,4)\} ≡ \{(3,4),(1,2)\}
    \{(1,2),(3,4)\} ≡ (1,2),(3,4)    [0, \pi] ≡ 0 \le \theta \le \pi
    \left(0,\frac{1}{e}\right) ≡ (0, e^{-1})    0<a<1 ≡ (0,1)    1 \leq x ≡ [1,\infty)
    # names
    2 + 3 = 6 = 5 ≢ 5    \frac13 \approx 0.33 ≡ \frac13
    # angles
    \sin 30^\circ ≡ \frac12
    # empty set
    \emptyset ≢ \text{none}
    # one way
    28 → 28\text{ percent}    100 → 100 percent    28\text{ percent} ↛ 28    100 percent ↛ 100
    0.5 ↛ 0.5\%    28\text{ cm} ↛ 28\%    \$28 ↛ 28\%    28^\circ ↛ 28\%    x ↛ 28\%
    \sqrt2 ↛ 1.4142    -\sqrt2 ↛ 1.4142135623730951    i\sqrt2 ↛ 1.4142135623730951
    \infty ↛ 0.333333333333333    0.3 ↛ 0.30000000000000004    \frac13 ↛ 0.33
    0.0000000000 ↛ 1/10^{12}    0.333333333 ↛ 1/3    1,23 ↛ 1.24
"""
AIMED = r"""
    # calls
    I(0)e^{-t/RC} ≢ 0    V(0)e^{-kt} ≡ e^{-kt}V(0)    2f(x) ≢ f(2x)    f(x+1) ≢ xf+f
    f(1+x) ≡ f(x+1)    f(x)+g(x) ≡ g(x)+f(x)    f(x)g(x) ≢ f(g(x))    f(g(x)) ≢ g(f(x))
    3f(2) ≢ 2f(3)    f(2)+f(3) ≢ f(5)    f(0) ≢ 0    f(x) ≢ xf
    \frac{\zeta(3)}{2} ≢ \zeta(\frac32)    \frac{\zeta(3)}{2} ≡ \frac12\zeta(3)
    \zeta(2)+\zeta(3) ≢ \zeta(5)    3\zeta(2) ≢ 2\zeta(3)
    \Gamma(1/3) ≡ \Gamma\left(\frac{1}{3}\right)    \Gamma(1/3) ≢ \frac{\Gamma}{3}
    2\Gamma(\frac14) ≢ \Gamma(\frac12)    2\Phi(1)-1 ≢ \Phi(2)-1    2\Phi(1)-1 ≡ -1+2\Phi(1)
    1-\Phi(2) ≢ 2-\Phi(1)-\Phi(1)    f(1)-f(0) ≢ f(1)    F(b)-F(a) ≢ F(b-a)    y(0)e^{2t} ≢ 0
    u(t-2) ≢ tu-2u    \delta(t) ≢ \delta t    \delta(2t) ≢ 2\delta(t)    x(t) ≢ xt
    P(A)+P(B) ≢ P(A+B)    g(x) = f(x-1)+2 ≡ f(x-1)+2
    c_1 y_1(t) + c_2 y_2(t) ≡ c_2 y_2(t) + c_1 y_1(t)    n(n+1) ≡ (n+1)n
    2\pi(r+h) ≡ 2\pi r+2\pi h    y(y-2) ≡ y^2-2y    xy(x+y) ≡ x^2y+xy^2    2(3) ≡ 6
    a(b+c) ≡ ab+ac    \pi(4) ≡ 4\pi
    # case
    \frac{GMm}{r^2} ≢ \frac{Gmm}{r^2}    \frac{GMm}{r^2} ≡ \frac{GMm}{r^{2}}    \Omega_0 ≢ \omega_0
    \Delta_1 ≢ \delta_1    \Gamma ≢ \gamma    PRT ≢ prt    mgH ≢ mgh
    \overline{AB} ≢ \overline{ab}    \triangle ABC ≢ \triangle aBC    \text{Saturday} ≡ SATURDAY
    \text{No Solution} ≡ no solution    Group A ≢ group B    \text{Both are Even} ≡ both are even
    \lim_{n\to\infty} A_n ≢ \lim_{n\to\infty} a_n    \int_0^T x\,dx ≢ \int_0^t x\,dx
    {}_nC_r ≢ {}_Nc_r
    # floors
    \lfloor n/100 \rfloor ≢ \lfloor n/10 \rfloor    \lfloor n/100 \rfloor ≢ 0
    \lfloor n/100 \rfloor ≢ \lfloor (n+1)/100 \rfloor
    \left\lfloor\frac{n}{100}\right\rfloor ≡ \lfloor 0.01n \rfloor
    \lceil n/50 \rceil ≢ \lceil n/20 \rceil    \lceil n/2 \rceil ≢ \lfloor n/2 \rfloor + 1
    \lfloor x \rfloor ≢ x    \lfloor \sqrt{n} \rfloor ≢ \lfloor \sqrt{n+1} \rfloor
    \lfloor \log_2 n \rfloor + 1 ≢ \lfloor \log_{10} n \rfloor + 1    \lfloor -2.5 \rfloor ≢ -2
    n - \lfloor n/1000 \rfloor ≢ n    \lfloor \log_{10} 999 \rfloor ≢ 3
    \sin x(x+1) ≢ \sin(x(x+1))    \{1,2\} ≡ {1,2}
    # times of day
    1:03 PM ≢ 2:06 PM    3:30 pm ≡ 3:30 PM    3:30 PM ≢ 3:30 AM    1:03 PM ≢ \frac{1}{3}
    # ranges and scores
    10-20 years ≡ 10–20 years    5-7 cm ≢ 3-5 cm    10-20 years ≢ -10 years
    # approximations
    P(X=5) \approx 0.17 ≢ P(X=5)    P(X=5) \approx 0.17 ≢ P(X=5) \approx 0.83
    P(X=5) \approx 0.17 ≡ 0.17    P(X=5) ≈ 0.83 ≢ 0.17    P(X>2) \approx 0.3 ≢ P(X>2) \approx 0.7
    E[X] \approx 3.2 ≢ E[X]    \bar{x} \approx 5 ≢ \bar{x} \approx 6    x + y \approx 3 ≢ x+y
    \sigma \approx 1.5 ≡ 1.5    \frac{a}{b} \approx 2 ≢ \frac{a}{b}    2\pi \approx 6.28 ≡ 2\pi
    # units and currencies
    -5\text{ cm} ≢ -5\text{ km}    x ↛ 0.1428571428571    i\% ↛ 1    \$5 ≢ 5 cents
    \$5 ≢ 5\text{ cents}    \$5 ≢ €5    £5 ≢ \$5    \text{Rs. }5 ≢ \$5    5 USD ≡ \$5
    5\text{ euros} ≡ €5    5\text{ euros} ≢ 5\text{ dollars}    60^\circ ≢ 60\text{ radians}
    60^\circ ≢ 60\text{ rad}    60° ≡ 60\text{ degrees}    60° ≢ 60 minutes
    5\text{ kg} ≢ 5\text{ g}    5\text{ mg} ≢ 5\text{ Mg}    \$5 million ≢ \$5
    \$1.50 ≡ 1.50\text{ dollars}    -\$20 ≢ \$20
    9.8\,\mathrm{m\,s^{-2}} ≢ 9.8\,\mathrm{m\,s^{-1}}    9.8\ \mathrm{m\cdot s^{-2}} ≡ 9.8
    9.8\,m\,s^{-2} ≡ 9.8
    # words behind
    5\text{ ppm} ≢ 5    5 ppb ≢ 5    5x ≢ 5    5\text{bn} ≢ 5    5 per mille ≢ 5
    5 percentage points ≢ 0.05    5\text{ basis points} ≢ 5    5-fold ≢ 6    5 does not work ≢ 5
    5 is impossible ≢ 5    5\text{ isn't it} ≢ 5    5 (rejected) ≢ 5    5 too small ≢ 5
    5 remainder 2 ≢ 5    5\text{ R }2 ≢ 5    5\text{ mod }12 ≢ 5    5 oranges ≡ 5
    5\text{ kids} ≡ 5    5 students in total ≡ 5
    # words before
    not = 5 ≢ 5    \text{not} = 5 ≢ 5    not equal to 5 ≢ 5    \text{half the sum} = 5 ≢ 5
    \text{twice the number} = 5 ≢ 5    never 5 ≢ 5    \text{Total} = 5 ≡ 5    \text{minus }5 ≢ 5
    negative 5 ≢ 5    anything but 5 ≢ 5    \text{Answer: }5 ≡ 5    \text{Length} = 5\text{ cm} ≡ 5
    x^{-1} = 5 ≢ 5
    # and, or
    x<-1 \text{ or } x>5 ≢ x<-1 \text{ and } x>5    x<-1 or x>5 ≢ x<-1 and x>5
    x \ge 2 \text{ and } x \le 3 ≢ x \ge 2 \text{ or } x \le 3    x > 2 \text{ or } x < 5 ≢ (2,5)
    x\ne1 \text{ and } x\ne2 ≢ x\ne1 \text{ or } x\ne2    a>0 \text{ and } b>0 ≢ a>0 \text{ or } b>0
    x=1 \text{ and } x=2 ≡ x=2 \text{ or } x=1    x<-1 or x>5 ≡ (-\infty,-1)\cup(5,\infty)
    x<-1 and x>5 ≢ (-\infty,-1)\cup(5,\infty)    3 \text{ and } 4 ≡ 3, 4
    # matrices that do not commute
    A^{-1}B ≢ BA^{-1}    A^{-1}B ≡ A^{-1} B    P^{-1}AP ≢ A    A^TB ≢ BA^T    A^TB ≢ B^TA
    PDP^{-1} ≢ P^{-1}DP    \frac{PV}{nR} ≡ \frac{VP}{Rn}
    # names of what was asked
    m+n = 601 → 601    m + n = 601 → 601    a+b+c = 47 → 47    p+q = 3+4 = 7 → 7
    m+n = 100+501 = 601 → 601    100m+n = 1205 → 1205    m+n = 601 ↛ 600    a+b+c = 47 ↛ 46
    m+n = 600 + 2 = 601 ↛ 601    mn = 12 → 12    x^2+y^2 = 25 ↛ 25    2m = 10 ↛ 10
    # letters
    \omega_0 ≡ \omega_{0}    2\omega_0 ≡ \omega_0 \cdot 2
    \frac{\mu_0 I}{2\pi r} ≡ \frac{I\mu_0}{2 r\pi}    \frac{\hbar^2}{2m} ≡ \frac{1}{2m}\hbar^2
    \frac{3}{2}\hbar\omega ≡ \frac{3\omega\hbar}{2}    \lambda_1+\lambda_2 ≡ \lambda_2+\lambda_1
    \varepsilon_0 ≡ \epsilon_0    \varphi ≡ \phi    \hbar ≢ h    \mu_0 ≢ \mu
    \alpha_1\alpha_2 ≢ \alpha_1^2    \theta_1 - \theta_2 ≢ \theta_2-\theta_1
    # large powers
    x^{50}+1 ≡ 1+x^{50}    x^{50}+1 ≢ x^{50}-1    x^{100}-y^{100} ≡ -y^{100}+x^{100}
    n = 2^{1009} ≡ 2^{1009}    2^{1009} ≡ 2\cdot 2^{1008}    2^{1009} ≢ 2^{1008}
    2^{2024}-1 ≢ 2^{2024}    2^{2024}-1 ≡ (2^{1012}-1)(2^{1012}+1)    10^{1000}+1 ≢ 10^{1000}
    \frac{1}{2^{1009}} ≢ \frac{1}{2^{1010}}    x^{2023} ≢ x^{2022}    200! ≢ 199!
    \frac{200!}{199!} ≡ 200
    # percent, boxes, choices
    8\% → $8\%$    8 → $8\%$    $8\%$ ≡ 8\%    $0.08$ ≡ 8\%    8\% ≢ $80\%$    \textbf{(A)}\ 5 → A
    \textbf{(A)}\ 5 → 5    \textbf{(A)}\ 5 ↛ B    \textbf{(A)}\ 5 ↛ 6
    \text{(C)}\ \frac{1}{2} → \frac12    \textbf{(A)}\ 5 ↛ \textbf{(B)}\ 5    \mathbf{B} ≡ B
    \mathbf{B} ≢ C    \boldsymbol{(D)} ≡ D
    # points by their coordinates
    x = 3, y = -2 ≡ (3,-2)    x = 3, y = -2 ≢ (-2,3)    x=1, y=2, z=3 ≡ (1,2,3)
    x=3 \text{ and } y=-2 ≡ (3,-2)    x=3 \text{ or } y=-2 ≢ (3,-2)    x = 3, x = -2 ≢ (3,-2)
    x = 3, y = -2 ≢ [3,-2)    x = 3, y = -2 ≢ 3, -2
    # cancellation and towers
    10^{30}+\pi-10^{30} ≡ \pi    10^{30}+\pi-10^{30} ≢ 0    e^{e^{e^{e^{e}}}} ≢ 1
    \sin(10^{500}) ≢ 0    \sqrt{10^{200}+1}-10^{100} ≢ 0
    # calls 2
    \sin(2)x ≢ \sin(2x)    T(n) = 2T(n/2)+n ≢ T(n) = T(n)+n    C(5,2) ≢ 10    C(n,k) ≢ C(k,n)
    N(0)e^{kt} ≢ N(1)e^{kt}    N_0 e^{kt} ≡ e^{kt}N_0    f^{-1}(3) ≢ \frac{3}{f}
    (f\circ g)(x) ≢ fgx    \ln(f(2)) ≢ f(\ln 2)    |f(2)| ≢ f(|2|)    \sqrt{f(4)} ≢ f(2)
    E(X) ≢ EX    E(X+Y) ≢ E(X)    \text{Var}(X) ≢ \text{Var}(Y)
    \operatorname{Re}(z) ≢ \operatorname{Im}(z)    \log(2)x ≢ \log(2x)    \max(a,b) ≢ \min(a,b)
    \gcd(6,9) ≢ \gcd(9,12)    \binom{n}{k} ≢ \binom{k}{n}    2^{f(3)} ≢ 2^{3f}    d(n) ≢ dn
    \pi(100) ≢ 25    i(2+3) ≡ 5i    3x(2x-1) ≡ 6x^2-3x
    \frac{1}{2}m(v^2-u^2) ≡ \frac{m(v^2-u^2)}{2}
    # case 2
    k_B T ≢ k_b T    \frac{V}{R} ≢ \frac{v}{r}    \text{A} ≢ a    N ≢ n    \mathbf{F} ≢ f
    \text{rectangle} ≡ Rectangle    \text{The Answer is Even} ≡ the answer is even    HCl ≢ HCL
    NaCl ≢ NACL    Co ≢ CO    \text{pH} ≢ \text{PH}    AB ≢ ab
    # floors 2
    \lfloor \frac{n^2}{4} \rfloor ≢ \frac{n^2}{4}
    \lfloor \frac{n^2}{4} \rfloor ≡ \lfloor n^2/4 \rfloor    \lfloor 2x \rfloor ≢ 2\lfloor x \rfloor
    \lceil 0.001x \rceil ≢ 1    [x] ≢ x    \lfloor 10^9 \sqrt{2} \rfloor ≢ 1414213563    \{x\} ≢ x
    n \bmod 7 ≢ n \bmod 5
    # times, dates, ranges 2
    5\text{-}3 ≢ 5    10\%-20\% ≢ 20\%-30\%    \$10-\$20 ≢ \$20-\$30    10–12 weeks ≢ 12–14 weeks
    8 hours 30 minutes ≢ 8 hours    8\text{ h }30\text{ min} ≢ 8\text{ h}    from 10 to 20 ≢ 20
    x-3 ≢ x-2    7-2x ≢ 7-x
    # approximations 2
    f(2) \approx 3 ≢ f(2)    \text{speed} \approx 3 ≢ \text{speed} \approx 4
    \frac{dy}{dx} \approx 2 ≢ \frac{dy}{dx}    n! \approx 120 ≢ n!    x \approx 3 ≢ x
    x \approx 3 ≢ x \approx 4    \sqrt{2} + x \approx 2 ≢ \sqrt2 + x    \approx 0.17 ≡ 0.17
    # units 2
    5\ \Omega ≢ 5\ \text{V}    5\text{ lb} ≢ 5\text{ kg}    100°C ≢ 100°F    ¥500 ≢ \$500
    500\text{ yen} ≢ 500\text{ won}    5¢ ≢ \$5    5\text{ dollars} ≢ 5\text{ dimes}
    3\text{ ft} ≢ 3\text{ yd}    3\text{ feet} ≡ 3\text{ ft}    2\text{ hours} ≡ 2\text{ hrs}
    30\text{ mph} ≡ 30\text{ miles per hour}    1\text{ kWh} ≢ 1\text{ kW}
    1\text{ mV} ≢ 1\text{ MV}    1.6\times10^{-19}\,\mathrm{C} ≡ 1.6\times10^{-19}
    6.63\times10^{-34}\,\mathrm{J\cdot s} ≢ 6.63\times10^{-34}\,\mathrm{J/s}
    x = 60^\circ ≢ x = 60\text{ rad}    (5\text{ cm}, 6\text{ cm}) ≢ (5\text{ m}, 6\text{ m})
    5\text{ cm}, 6\text{ cm} ≢ 5\text{ m}, 6\text{ m}
    # words 2
    5\text{ thousandths} ≢ 5    5G ≢ 5    5\text{ squared meters} ≢ 25    5\text{ or more} ≢ 5
    5\text{ unless} ≢ 5    5\text{ if }x>0 ≢ 5    5 (not 6) ≢ 6    5\text{ times larger} ≢ 6
    \text{less than }5 ≢ 5    \text{at most }5 ≢ 5    < 5 ≢ 5    \text{The answer cannot be }5 ≢ 5
    \text{It is false that it is }5 ≢ 5    5\text{ away from } 3 ≢ 5    5\text{?} ≢ 6
    5\text{ ways} ≡ 5    5\text{ distinct values} ≡ 5    there are 5 ≢ 6    There are 5 ≡ 5
    5\text{ choose }2 ≢ 5    \text{opposite of }5 ≢ 5
    # and or 2
    x \neq 0 \text{ and } y \neq 0 ≢ x \neq 0 \text{ or } y \neq 0
    1<x<2 \text{ or } 3<x<4 ≢ 1<x<2 \text{ and } 3<x<4    p \text{ and } q ≢ p \text{ or } r
    x=1 \text{ or } y=2 ≢ (1,2)
    # matrices 2
    ABA ≢ A^2B    S^{-1}AS+I ≢ A+I
    # names 2
    m+n = 601, k = 2 ↛ 601    a-b = 5 ↛ 6    m+n+1 = 601 ↛ 600    m+n = 601 or 602 ↛ 601
    m + n = \boxed{601} ↛ 600    a+b = \frac{7}{2} → 3.5    a+b = c ↛ c    x+y = 5 ↛ 5
    # points 2
    x = 1, y = 2, z = 3 ≢ (3,2,1)    x = 1, y = 2 ≢ \{1,2\}    x=2, y=5 ≢ x=5, y=2
    # percent choices 2
    \textbf{(A)}\ 5 \text{ or } (B) ↛ A    (A) and (B) ↛ A    (A) ≢ 5    \text{(B) } 12\% → B
    \text{(B) } 12\% → 12\%    \mathbf{(B)} → B    8\% ↛ 8    $0.5\%$ ≢ 0.5    \%8 ≢ 80
    # powers 2
    (x+1)^{40} ≢ x^{40}+1    x^{64}-1 ≡ (x^{32}-1)(x^{32}+1)    (x^{20})^5 ≡ x^{100}
    x^{-50} ≡ \frac{1}{x^{50}}    10^{100} ≡ 100^{50}
    \left(\frac{2}{3}\right)^{2023} ≢ \left(\frac{2}{3}\right)^{2024}    e^{-2023} ≢ 0
    e^{1000} ≢ e^{1001}
    # third
    f(x)=2f(x-1) ≢ f(x)=f(2x-2)    f(x)=f(x+1) ≢ f(x)=x    xf(2) ≢ 2f(x)    f(2)^2 ≢ f(4)
    f^2(x) ≢ f(x^2)    \sin(f(x)) ≢ f(\sin x)    P(A \cap B) ≢ P(A \cup B)    P(A|B) ≢ P(B|A)
    \mathbb{E}[X] ≢ \mathbb{E}[Y]    \text{Var}(2X) ≢ 2\text{Var}(X)
    \lfloor x \rfloor + \lfloor y \rfloor ≢ \lfloor x+y \rfloor    5:00 ≢ 5    2:15 ≢ 2.25
    3-2 ≢ 3:2    10-20 km ≢ 10-20 miles    \$5.00 ≢ \$500
    5\text{ million dollars} ≢ 5\text{ billion dollars}    60\% ≢ 60^\circ    60' ≢ 60
    5\text{ hundred} ≢ 5    5\text{ (approx.)} ≢ 6    5\text{ units less} ≢ 5    5 less than x ≢ x-5
    \text{five less than }x ≢ x    5\text{ or }-5 ≢ 5    5\ \text{or}\ 6 ≢ 5    \text{no } 5 ≢ 5
    \text{Not }5 ≢ 5    \neg 5 ≢ 5    \lnot p ≢ p    \sim p ≢ p    A^c ≢ A    z^* ≢ z    \vec{v} ≢ 5
    |v| ≢ v    \|v\| ≢ v    \Re z ≢ \Im z    A \times B ≢ B \cup A    A \setminus B ≢ B \setminus A
    p \implies q ≢ q \implies p    a \equiv b \pmod 3 ≢ a \equiv b \pmod 5    1 \pmod 3 ≢ 1 \pmod 5
    2 \mod 5 ≢ 2    x \to \infty ≢ \infty    x = 1 \text{ (double root)} ≢ 2
    x=1, x=2, x=3 ≢ x=1, x=2    x_1 = 1, x_2 = 2 ≢ x_1 = 2, x_2 = 1
    (1,2) \text{ or } (2,1) ≢ (1,2)    [1,2] \cup [3,4] ≢ [1,4]    \{1,2,3,\dots\} ≢ \{1,2,3\}
    \{x \mid x>0\} ≢ \{x \mid x<0\}    \{2n\} ≢ \{n\}    \mathbb{R}^2 ≢ \mathbb{R}^3
    \mathbb{R}^+ ≢ \mathbb{R}    \mathbb{Q} ≢ \mathbb{R}    \sqrt[3]{x} ≢ 3\sqrt{x}
    x^{1/2} ≢ x^1/2    2^{-3} ≢ 2-3    -2^2 ≢ 4    (-2)^2 ≢ -4    -2^2 ≡ -4    1/2x ≢ 2x    3e ≢ 3
    1e-5 ≢ e-5    \frac{1}{2}\frac{1}{3} ≢ \frac12+\frac13    2\frac{1}{2} ≢ 1
    \sin x \cos x ≢ \sin(x\cos x)    \sin x^2 ≢ \sin^2 x    \ln x^2 ≢ (\ln x)^2    \log x ≢ \ln x
    \log_2 x ≢ \log_3 x    \arcsin x ≢ \frac{1}{\sin x}    \tan^{-1} x ≢ \cot x    e^{x^2} ≢ e^{2x}
    \binom{10}{3} ≢ \frac{10}{3}    \binom{10}{3} ≢ \binom{10}{4}    \binom{10}{3} ≡ \binom{10}{7}
    5!! ≢ 120    (5!)! ≢ 5!    x! ≢ x    0.\overline{12} ≢ 0.1\overline{2}    \frac{d}{dx} x^2 ≢ x
    \partial f ≢ f    \nabla f ≢ f    \det A ≢ A    \dim V ≢ V    \deg f ≢ f    0 ≢ -0.0001
    \text{yes} ≢ \text{no}    \text{Yes, } 5 ≢ 6    \text{infinitely many} ≢ \text{finitely many}
    \text{DNE} ≢ 0    \triangle ABC ≢ \triangle DEF    \angle ABC ≢ \angle ACB    ABCD ≢ ACBD
    1011_2 ≢ 1011_3    FF_{16} ≢ 255_{8}    H_2O ≢ HO_2    a_1 + a_2 ≢ a_{1+2}    2, 4, 6 ≢ 2, 4, 8
    2,5 ≢ 2.5    \frac{\partial f}{\partial x} ≢ \frac{f}{x}    \dfrac{dy}{dx} = 2x ≡ 2x
    # fourth
    2\cdot3\frac12 ≡ 7    5-3\frac{1}{2} ≡ 1.5    x = -3\frac14 ≢ -2.75    2^3\frac12 ≡ 4
    (1 1/2, 2 1/3) ≡ (3/2, 7/3)    1\frac12 \text{ and } 2\frac12 ≡ 2.5, 1.5
    \sqrt3\frac12 ≡ \frac{\sqrt3}{2}    a_1\frac12 ≢ a_{1.5}    3\frac{\pi}{4} ≢ 3+\frac\pi4
    12 1/2 ≢ 121/2    \$3\frac12 ≡ 3.5    1\frac12x ≡ 1.5x    (1,200,f(2)) ≢ (1200,f(2))
    f(1,234) ≢ f(1234)    \{1,234\} ≢ \{1234\}    \text{area} + 5 ≢ 5    \text{area} - 5 ≢ -5
    The answer is A or B ≢ A    (x, y) = (1, 2) ≡ x = 1, y = 2    x = 1, y = 2, x = 3 ≢ 1, 2, 3
    f(1) = 2, f(2) = 3 ≢ f(1) = 3, f(2) = 2    f(1) = 2, f(2) = 3 ≢ 3, 2    m+n = -5 ↛ 5
    m+n < 5 ↛ 5    m+n = 5x ↛ 5    m - n = 5 ↛ -5    -60° ≢ -60 rad    -60° ≡ -60
    x = 60° ≢ x = 60 rad    x > 5\text{ cm} ≢ x > 5\text{ m}
    \frac{5\text{ cm}}{2} ≢ \frac{5\text{ m}}{2}    (\pm 1, \mp 2) ≡ (1,-2), (-1,2)
    (\pm 1, \mp 2) ≢ (1,2), (-1,-2)    x = 1 \mp 2 ≡ 3, -1    AC ≢ CA    ABC ≢ CBA
    x₁+x₂ ≡ x_1+x_2    Ω₀ ≡ \Omega_0    x₁ ≢ x_2    μ_0 ≡ \mu_0    2**3**2 ≢ 232    2**3**2 ≡ 512
    2^3^2 ≢ 64    5!! ≢ (5!)!    \sqrt[3]{0} ≡ 0    0^\pi ≡ 0    \log_{\frac12} 8 ≡ -3
    \ln_2 8 ≢ \ln 8    \sin_2 x ≢ \sin x    \lfloor \sqrt{5050} \rfloor \approx 7 ≢ 7
    \lfloor 7/2 \rfloor = 4 ≢ 4    \lfloor n/9 \rfloor ≢ \lceil n/9 \rceil
    x \ne \pm 2 ≡ x \ne 2 \text{ and } x \ne -2    ((x+1))(x) ≡ x^2+x    ℝ ≡ \mathbb{R}
    \textbf{(E)}\ \text{none of these} → E    x < y ≢ y < x    \frac13 ≢ 0.3333333333333333
"""  # at the grammar: wrong answers that a former version rewarded, and right ones that it refused
REVIEWED = r"""
    # other numbers and conjunctions behind a number
    3\text{ or four} ≢ 3    3 or four ≢ 3    3 alternatively six ≢ 3    3 versus four ≢ 3
    3 oder vier ≢ 3    3 ou quatre ≢ 3    3 o cuatro ≢ 3    3 short of five ≢ 3    3 out of four ≢ 3
    3 vs four ≢ 3    3 instead of four ≢ 3    3\text{ rather than four} ≢ 3    3 bzw vier ≢ 3
    3\text{ out of 4} ≢ 3    3 (or 4) ≢ 3    3 and perhaps four ≢ 3    3 sinon quatre ≢ 3
    3 und vier ≢ 3    3 et quatre ≢ 3    3 entweder oder ≢ 3    3 apples ≡ 3    3 outer rings ≡ 3
    3 tons ≡ 3    3 ounces ≡ 3    3 weeks ≡ 3    3 freight trains ≡ 3
    # scale words
    5 mln ≢ 5    5\text{ bil.} ≢ 5    5 doz. ≢ 5    5 mega ≢ 5    5 kilo ≢ 5    5 Mio. ≢ 5
    5 mrd ≢ 5    5\text{ mln dollars} ≢ 5    50 per cent ≡ 0.5    50\text{ per cent} ≡ 50\%
    50 per cent ≢ 50    5 kilometers ≡ 5    5 megabytes ≡ 5    5 dozen ≡ 60
    # a denied choice
    (A) is wrong ↛ A    (A) none of these fits ↛ A    (A) 5 or 6 ↛ A    (A) 5 or 6 ↛ 5
    (A) is not the answer ↛ A    \textbf{(A)}\ \text{or B} ↛ A    (A)\ 5\text{ is wrong} ↛ A
    (A) 5\text{ oder }6 ↛ A    (A) 5, not 6 ↛ A    \textbf{(A)}\ \text{none of the above} → A
    (A) n \text{ squared} → A    (A) x \to \infty → A    (A) 3, 4 → A
    # a choice in other words
    Option B → B    option (B) ↛ C    Choice B → B    \text{Option B} → B    Option B ≢ 5
    D → \textbf{(D) } 30    30 → \textbf{(D) } 30    (D) → \textbf{(D) } 30    C ↛ \textbf{(D) } 30
    31 ↛ \textbf{(D) } 30    \textbf{(D) } 30 ≡ \textbf{(D)}\ 30    Option D → \textbf{(D) } 30
    (C) 30 ↛ \textbf{(D) } 30    \text{(D)} → \textbf{(D) } 30
    # times, ranges, scores and dates inside a box
    \text{1:15 PM} ≢ \text{2:30 PM}    \text{1:15 PM} ≡ 1:15 PM
    \text{10-20 years} ≢ \text{20-30 years}    \text{10-20 years} ≡ 10-20 years    \text{3-2} ≢ 1
    3-2 ≡ 1    \text{3:5} ≡ 6:10
    # products that do not commute
    A \times B ≢ B \times A    A×B ≢ B×A    A \times B ≡ A\times B
    \vec{a} \times \vec{b} ≢ \vec{b} \times \vec{a}
    \mathbf{u} \times \mathbf{v} ≢ \mathbf{v}\times\mathbf{u}
    \hat{i} \times \hat{j} ≢ \hat{j} \times \hat{i}    2 \times 3 ≡ 3 \times 2
    a \times b ≡ b \times a
    \overrightarrow{AB}\times\overrightarrow{AC} ≢ \overrightarrow{AC}\times\overrightarrow{AB}
    # or between inequalities
    x<1 \text{ or } x>5 ≢ x<1, x>5    x < 1 or x > 5 ≡ x > 5 or x < 1    x>2, x<5 ≢ (-\infty,5)
    x>2, x<5 ≢ (2,\infty)\cup(-\infty,5)    x<1, x>5 ≡ x>5, x<1    x=1 or x=2 ≡ x=1, x=2
    # right answers of real data
    \left. 5 \right. ≡ 5    \left. \frac{x}{2} \right. ≡ \frac{x}{2}    0.\overline{3} ≡ 1/3
    0.\overline3 ≡ \frac13    1.\overline{27} ≡ \frac{14}{11}    -0.\overline{3} ≡ -1/3
    0.\overline{3}x ≡ \frac{x}{3}    0.\overline{3} ≢ 0.\overline{33}3    0.\overline{} ≢ 0
    3.\overline{3}\text{ cm} ≡ \frac{10}{3}    5\text{ in}^2 ≡ 5\text{ square inches}
    5\text{ in}^2 ≢ 5\text{ inches}    5\text{ mL} ≡ 5\text{ milliliters}
    5\text{ mL} ≢ 5\text{ liters}    5\text{ cm}^3 ≡ 5\text{ cubic centimeters}
    5\text{ sq ft} ≡ 5\text{ ft}^2    5\text{ L} ≡ 5\text{ liters}    5 mL ≢ 5\text{ mg}
    \frac{n!}{2} ≡ \frac{1}{2}n!    n!-1 ≡ -1+n!    n! ≢ (n+1)!    n! ≢ k!    n!k! ≡ k!n!
    2\binom{n}{k} ≡ \binom{n}{k} \cdot 2    \binom{n}{k}+1 ≢ \binom{n}{k}
    \binom{n+1}{k} ≡ \binom{1+n}{k}    \binom{n}{k} ≢ \binom{n}{k+1}    (2n)! ≢ 2n!
    \binom{n}{k} ≢ \frac{n}{k}    n! \cdot n ≢ (n!)^2    2 to 3 → 2:3    2\text{ to }3 → 2:3
    4 \text{ to } 6 → 2:3    \text{2 to 3} → 2:3    2 to 3 ↛ 2    3 to 2 ↛ 2:3    2 to 3 ↛ \frac23
    2 to 3 ↛ (2,3)    2 to 3 to 4 ↛ 2:3    $5 ≢ 5 cents    $5$ ≡ \$5
"""  # found by strangers who tried to be rewarded for a wrong answer


def judged(table: str) -> list[tuple[str, str, str, bool]]:
    """(class, given, gold, verdict) of every pair of a table, in the directions that it says."""
    kind, found = "", []
    for line in filter(None, map(str.strip, table.splitlines())):
        if line.startswith("# "):
            kind = line[2:]
            continue
        for pair in line.split("    "):
            sign = next(sign for sign in "≡≢→↛" if f" {sign} " in pair)
            given, gold = pair.split(f" {sign} ")
            found.append((kind, given, gold, sign in "≡→"))
            if sign in "≡≢":
                found.append((kind, gold, given, sign == "≡"))
    return found


JUDGED = judged(PAIRS) + judged(AIMED) + judged(REVIEWED)


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, *_ in JUDGED))
def test_answers_are_judged_as_written(kind):
    cases = [case for case in JUDGED if case[0] == kind]
    assert [case for case in cases if same_answer(*case[1:3]) != case[3]] == []


def test_every_answer_is_itself():
    texts = {text for _, *pair, _ in JUDGED for text in pair} - {"nan"}
    assert [text for text in sorted(texts) if not same_answer(text, text)] == []


@pytest.mark.parametrize("text", ["", " ", "nan"])
def test_nothing_is_no_answer(text):
    assert not same_answer(text, text)


def test_known_limits_are_those_of_the_page():
    """Each row of its table: the answer, the gold answer, right or wrong, refused or rewarded."""
    page = (Path(answers.__file__).parents[2] / "docs/verifiers.md").read_text()
    rows = re.findall(r"(?m)^\| `(.+)` \| `(.+)` \| (right|wrong).* (refused|rewarded) \|$", page)
    assert len(rows) > 15
    for given, gold, *_, verdict in rows:
        given = given.replace("\\|", "|")  # as a table in Markdown writes it
        assert same_answer(given, gold) == (verdict == "rewarded"), (given, gold)


def test_rationals_are_exact():
    """a/b against the same number written otherwise, and against its neighbour a/b + 10^-60."""
    rng = random.Random(0)
    for _ in range(200):
        a, b, k = rng.randint(-(10**9), 10**9), rng.randint(1, 10**9), rng.randint(2, 99)
        given = f"\\frac{{{a * k}}}{{{b * k}}}"
        assert same_answer(given, f"{a}/{b}")
        assert not same_answer(given, f"{a * 10**60 + b}/{b * 10**60}")


def test_polynomials_are_equal_whatever_their_order_and_no_others():
    """Random ones in x and y: terms shuffled, then one coefficient changed."""
    rng = random.Random(0)
    for _ in range(100):
        terms = [
            [rng.randint(1, 9), rng.randint(0, 40), rng.randint(0, 3)]
            for _ in range(rng.randint(2, 6))
        ]
        gold = "+".join(f"{c}x^{{{n}}}y^{m}" for c, n, m in terms)
        rng.shuffle(terms)
        given = "+".join(f"x^{{{n}}}\\cdot {c}y^{m}" for c, n, m in terms)
        assert same_answer(given, gold)
        terms[0][0] += 1
        assert not same_answer("+".join(f"{c}x^{{{n}}}y^{m}" for c, n, m in terms), gold)


def test_pairs_of_letters_differ_in_sign_at_one_point():
    """Else |x| + |y| would be |x + y|; at the other points all are negative, or all positive."""
    for pair in ("xy", "ab", "mn", "pq", "uv", "st", "bc", "nk", "cd"):
        one, other = (answers.unknown(name, answers.POINTS[-1]) for name in pair)
        assert (one > 0) != (other > 0), pair


PIECES = r"""
    1 2 x n \pi e i f( ( ) [ ] { } \{ \} \frac \sqrt ^ _ + - * / = < > \le \ne \approx , ; and or
    \cup \pm ! | \% ° \$ \text{ \text{cm} million \sin \ln ^{-1} \begin{pmatrix} & \\ \end{pmatrix}
    \lfloor \rfloor \binom \infty : . ½ ² √ \emptyset A B \hbar #
"""


@pytest.mark.parametrize("seed", range(4))
def test_answers_raise_nothing_and_are_symmetric_on_random_text(seed):
    rng = random.Random(seed)
    for _ in range(300):
        left, right = ("".join(rng.choices(PIECES.split(), k=rng.randint(1, 14))) for _ in range(2))
        for one, other in ((left, right), (left, left + " "), (left, f"({left})")):
            symmetric = answers.same_meaning(one, other)
            assert symmetric == answers.same_meaning(other, one), (one, other)
            same_answer(one, other)


def calls_of_python(given: str, gold: str) -> int:
    """Functions that a comparison calls: its time, as far as that is the same on every machine."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        same_answer(given, gold)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", bench_answers.HOSTILE)
def test_no_comparison_takes_long(name):
    """bench_answers.py measures seconds, of more sizes and more variants."""
    for size in (10, 40, 150, 9_990):
        text = bench_answers.HOSTILE[name](size)[:10_000]
        for other in (text[1:] + text[:1], text.replace("x", "(x+0)"), "1, 2, 3"):
            assert calls_of_python(text, other) < 250_000


@pytest.mark.parametrize(
    "piece",
    ["√", "\\sqrt{", "\\frac1", "\\sin^", "\\log_", "(", "f(", "-", "|", "1±", "1:2∪", "1^", "!"],
)
def test_nothing_is_read_deeper_than_python_can(piece):
    times = answers.MAX_EXPRESSION // len(piece)
    for text in (piece * times, piece * (times - 1) + "5"):
        assert not same_answer(text, "5")
        assert not same_answer("5", text)


def test_a_few_roots_and_fractions_may_stand_within_one_another():
    assert same_answer("√" * 10 + "1", "1")
    assert same_answer("\\sqrt{" * 25 + "1" + "}" * 25, "1")
    assert same_answer("\\frac{1}{" * 25 + "2" + "}" * 25, "\\frac12")
