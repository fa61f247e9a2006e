#!/bin/sh
set -e
cd /app
sed 's/ msg=.*//' app.log | awk '
    {
        for (i = 2; i <= NF; i++) {
            at = index($i, "=")
            value[substr($i, 1, at - 1)] = substr($i, at + 1)
        }
        if (value["level"] == "ERROR" && value["retry"] != "1") {
            count[value["service"]]++
            total[value["service"]] += value["ms"]
        }
        for (key in value) delete value[key]
    }
    END {
        for (name in count)
            printf "%s\t%d\t%d\n", name, count[name], int((2 * total[name] + count[name]) / (2 * count[name]))
    }' | sort -t "$(printf '\t')" -k2,2nr -k1,1 >report.tsv
