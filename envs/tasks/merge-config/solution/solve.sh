#!/bin/sh
set -e
cd /app
awk '
    function trimmed(text) {
        gsub(/^[ \t]+|[ \t]+$/, "", text)
        return text
    }
    {
        line = trimmed($0)
        if (line == "" || line ~ /^[#;]/) next
        sub(/ #.*/, "", line)
        if (line ~ /^\[.*\]$/) {
            section = trimmed(substr(line, 2, length(line) - 2))
            next
        }
        at = index(line, "=")
        key = trimmed(substr(line, 1, at - 1))
        text = trimmed(substr(line, at + 1))
        if (text == "!unset") delete values[section "\t" key]
        else values[section "\t" key] = text
    }
    END { for (place in values) print place "\t" values[place] }
' conf/1-base.conf conf/2-site.conf conf/3-host.conf | LC_ALL=C sort -t "$(printf '\t')" -k1,1 -k2,2 | awk -F '\t' '
    $1 != section {
        section = $1
        print "[" section "]"
    }
    { print $2 "=" $3 }
' >merged.conf
