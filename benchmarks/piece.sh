#!/usr/bin/env bash
# A piece of the paper's tables on a machine that is there for a short time only.
#
#     benchmarks/piece.sh FOLDER MINUTES WHAT... [options of fedsap reproduce]
#     benchmarks/piece.sh results 8 table1 --only cifar10,cifar100 --data DIR
#
# FOLDER keeps what earlier pieces came to (runs.tgz, a few MB) and gets what this one adds: runs that are over are not made
# again on the next machine. The tables so far are in FOLDER/NAME.json. A run that is cut off goes on if the machine is the
# same, and begins anew if it is another: checkpoints stay where they are. WORK is where runs lie (default: runs/pieces).
set -euo pipefail
folder=$1 minutes=$2
shift 2
work=${WORK:-runs/pieces}
mkdir -p "$folder" "$work"
if [ -f "$folder/runs.tgz" ]; then tar xzf "$folder/runs.tgz" -C "$work" --skip-old-files; fi
status=0
"${FEDSAP:-fedsap}" reproduce "$@" --minutes "$minutes" --out "$work" --json >"$folder/last.json" || status=$?
(cd "$work" && find . -name result.json -printf '%h\n' | sort >.over)
tar czf "$folder/runs.tgz.part" -C "$work" --exclude 'checkpoint*' --exclude snapshots -T "$work/.over"
mv "$folder/runs.tgz.part" "$folder/runs.tgz"
find "$work" -maxdepth 1 -name '*.json' -exec cp {} "$folder" \;
wc -l <"$work/.over" | xargs echo "runs that are over:"
exit $status
