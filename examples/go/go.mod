module story

go 1.19
