// Story continues a prompt, greedily; the text appears as it is made.
//
//	PKG_CONFIG_PATH=PREFIX/lib/pkgconfig go build      (PREFIX: where `zig build --prefix PREFIX` installed)
//	./story model.colibri "Once upon a time" [tokens]
package main

import (
	"fmt"
	"os"
	"strconv"
)

func tell(path, prompt string, most int) error {
	model, err := OpenModel(path)
	if err != nil {
		return err
	}
	defer model.Close()
	session, err := NewSession(model)
	if err != nil {
		return err
	}
	defer session.Close()
	ends, err := model.EndTokens()
	if err != nil {
		return err
	}
	tokens, err := model.Tokenize(prompt)
	if err != nil {
		return err
	}
	return generate(session, model.Stream(), prompt, tokens, ends, most)
}

func generate(session *Session, stream *Stream, prompt string, tokens []int32, ends map[int32]bool, most int) error {
	fmt.Print(prompt)
	for i := 0; i < most; i++ {
		token, err := session.Next(tokens)
		if err != nil {
			return err
		}
		if ends[token] {
			break
		}
		text, err := stream.Add(token)
		if err != nil {
			return err
		}
		fmt.Print(text)
		tokens = []int32{token}
	}
	rest, err := stream.Add(-1)
	fmt.Println(rest)
	return err
}

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: story MODEL PROMPT [TOKENS]")
		os.Exit(2)
	}
	most := 60
	if len(os.Args) > 3 {
		most, _ = strconv.Atoi(os.Args[3])
	}
	if err := tell(os.Args[1], os.Args[2], most); err != nil {
		fmt.Fprintln(os.Stderr, "story:", err)
		os.Exit(1)
	}
}
